# SPDX-License-Identifier: Apache-2.0
"""LoRA reinforcement learning on Megatron-Core with vLLM sampling. See README.md.

Public names are imported on first use, so ``import megarl`` loads neither torch nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megarl.torch_addons import hide_cuda_addons

__version__ = "0.1.0"

hide_cuda_addons()

if TYPE_CHECKING:
    from megarl.build import build_model
    from megarl.checkpoint_engine.weight_sync import WeightSync
    from megarl.config import RunConfig, check_run, load_config
    from megarl.hf.transformers_model import TransformersModel
    from megarl.launch.run import train
    from megarl.lora.apply import apply_lora
    from megarl.lora.files.peft_folder import load_peft_config
    from megarl.loss import NllLoss, build_loss, group_advantages, sequence_weights
    from megarl.model.megatron_model import MegatronModel
    from megarl.model.step.packing import pack
    from megarl.sampler.process import SamplerProcess
    from megarl.types import Sample
    from megarl.verify.command import verify_model

# Public name -> the module that defines it.
_HOMES = {
    "MegatronModel": "megarl.model.megatron_model",
    "NllLoss": "megarl.loss",
    "RunConfig": "megarl.config",
    "Sample": "megarl.types",
    "SamplerProcess": "megarl.sampler.process",
    "TransformersModel": "megarl.hf.transformers_model",
    "WeightSync": "megarl.checkpoint_engine.weight_sync",
    "apply_lora": "megarl.lora.apply",
    "build_loss": "megarl.loss",
    "build_model": "megarl.build",
    "check_run": "megarl.config",
    "group_advantages": "megarl.loss",
    "load_config": "megarl.config",
    "load_peft_config": "megarl.lora.files.peft_folder",
    "pack": "megarl.model.step.packing",
    "sequence_weights": "megarl.loss",
    "train": "megarl.launch.run",
    "verify_model": "megarl.verify.command",
}

__all__ = [
    "MegatronModel",
    "NllLoss",
    "RunConfig",
    "Sample",
    "SamplerProcess",
    "TransformersModel",
    "WeightSync",
    "__version__",
    "apply_lora",
    "build_loss",
    "build_model",
    "check_run",
    "group_advantages",
    "load_config",
    "load_peft_config",
    "pack",
    "sequence_weights",
    "train",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megarl' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
