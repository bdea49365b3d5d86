"""LoRA on mcore's parallel linears: a plugin for any GPTModel, with or without MegatronModel.

adapter = apply_lora(chunks, peft_config, hf_config)
... train ...
adapter.save("out/adapter")            # a plain PEFT directory
"""

from megarl.lora.adapter import LoraAdapter
from megarl.lora.apply import apply_lora
from megarl.lora.peft_io import load_peft_config

__all__ = ["LoraAdapter", "apply_lora", "load_peft_config"]
