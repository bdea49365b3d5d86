# SPDX-License-Identifier: Apache-2.0
"""LoRA on mcore's parallel linears: a plugin for any GPTModel, with or without MegatronModel.

adapter = apply_lora(chunks, peft_config, hf_config)
... train ...
adapter.save("out/adapter")            # a plain PEFT directory
"""

from megarl.lora.adapter import LoraAdapter
from megarl.lora.apply import apply_lora
from megarl.lora.build_model import attach, build_model
from megarl.lora.files.peft_folder import load_peft_config
from megarl.lora.optimizer import complete_adam_states, load_optimizer
from megarl.lora.state import adapters_of

__all__ = [
    "LoraAdapter",
    "adapters_of",
    "apply_lora",
    "attach",
    "build_model",
    "load_optimizer",
    "load_peft_config",
    "complete_adam_states",
]
