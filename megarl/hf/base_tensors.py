# SPDX-License-Identifier: Apache-2.0
"""List the base weights of a model of transformers under the names of its files."""

from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from megarl.errors import UnsupportedError
from megarl.model.weights.hf_folder import WeightFolder
from megarl.model.weights.sharded_tensor import ShardedTensor

# Name under which PEFT puts a module that it wraps, once for each parameter that is adapted.
BASE = ".base_layer"


def base_tensors(model: PeftModel, folder: str, *, untied: bool) -> list[ShardedTensor]:
    """Return the base's tensors, without any adapter.

    Args:
        model: the model with its adapters.
        folder: its Hugging Face folder.
        untied: True lists a tied output layer too.

    Raises:
        UnsupportedError: transformers holds other tensors than the files do (experts that it stacks).
    """
    causal = model.get_base_model()
    held = {name.replace(BASE, ""): value for name, value in causal.state_dict().items() if ".lora_" not in name}
    tied = {name for name in getattr(causal, "all_tied_weights_keys", None) or {} if name in held}
    if not untied:
        held = {name: value for name, value in held.items() if name not in tied}
    stored = set(WeightFolder(folder).file_of)
    if unknown := sorted(held.keys() - stored - tied):
        raise UnsupportedError(
            f"'{unknown[0]}' is not a tensor of {folder}: transformers arranges the weights of this model_type "
            "differently from its files, and model.backend=transformers cannot send them to a sampler; set "
            "checkpoint_engine.base_weights=disk and content=adapter, or model.backend=local where the family is "
            "supported"
        )
    return [_whole(name, value) for name, value in held.items()]


def _whole(name: str, tensor: torch.Tensor) -> ShardedTensor:
    def read() -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def write(part: Any) -> None:
        raise UnsupportedError(f"'{name}' is a base weight, which nothing changes")

    view = None if isinstance(tensor, DTensor) else tensor
    return ShardedTensor(name, tuple(tensor.shape), tensor.dtype, None, read, write, view=view)
