# SPDX-License-Identifier: Apache-2.0
"""Adapt mcore's parallel linears by LoRA: a plugin for any GPTModel, with or without MegatronModel.

adapter = apply_lora(chunks, peft_config, hf_config)
... train ...
adapter.save("out/adapter")            # a plain PEFT directory
"""

from megarl.lora.adapter import LoraAdapter
from megarl.lora.apply import apply_lora
from megarl.lora.build_model import attach, build_model
from megarl.lora.files.peft_folder import load_peft_config
from megarl.lora.layers.state import adapters_of
from megarl.lora.optimizer import complete_adam_states, load_optimizer

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
