# SPDX-License-Identifier: Apache-2.0
"""Adapt mcore's parallel linears by LoRA: a plugin for any GPTModel, with or without MegatronModel.

adapter = apply_lora(chunks, peft_config, hf_config)
... train ...
adapter.save("out/adapter")            # a plain PEFT directory

Public names are imported on first use: ``section``, which checks a config, needs no Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.lora.adapter import LoraAdapter
    from megarl.lora.apply import apply_lora
    from megarl.lora.build import attach
    from megarl.lora.files.peft_folder import load_peft_config
    from megarl.lora.layers.state import adapters_of
    from megarl.lora.optimizer import complete_adam_states, load_optimizer

# Public name -> the module that defines it.
_HOMES = {
    "LoraAdapter": "megarl.lora.adapter",
    "adapters_of": "megarl.lora.layers.state",
    "apply_lora": "megarl.lora.apply",
    "attach": "megarl.lora.build",
    "complete_adam_states": "megarl.lora.optimizer",
    "load_optimizer": "megarl.lora.optimizer",
    "load_peft_config": "megarl.lora.files.peft_folder",
}

__all__ = [
    "LoraAdapter",
    "adapters_of",
    "apply_lora",
    "attach",
    "complete_adam_states",
    "load_optimizer",
    "load_peft_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megarl.lora' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
