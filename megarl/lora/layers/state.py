# SPDX-License-Identifier: Apache-2.0
"""Make state dicts of adapted models: the base under its original names, the adapters beside it.

A checkpoint of the base, plain or distributed, fits the model with and without adapters. In a state dict an adapter's
matrix is below the linear that it adapts: ``...linear_qkv.adapters.default.lora_A.q_proj``. In a distributed checkpoint
its key ends in PEFT's name of the matrix. mcore stacks equal layers in one tensor there, but adapters may differ by
layer.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from megarl.lora.layers.matrices import AdapterMatrices
from megarl.peft.names import matrix_name

# Names of a wrapped linear's children.
BASE, ADAPTERS = "base_layer.", "adapters."

logger = logging.getLogger(__name__)


class WithBaseNames(torch.nn.Module):
    """A module with children ``base_layer`` and ``adapters``. Its state dict gives the base layer its original names.

    Attributes:
        states_adapters: True if state dicts include the adapters.
    """

    states_adapters = True

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_below_base)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return torch's state dict, without ``base_layer.`` in the names."""
        states = self.base_layer.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.states_adapters:
            self.adapters.state_dict(destination=states, prefix=f"{prefix}{ADAPTERS}", keep_vars=keep_vars)
        return states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return mcore's state dict for a distributed checkpoint. It may be loaded at another layout."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        states = dict(self.base_layer.sharded_state_dict(prefix, sharded_offsets, metadata))
        for name, adapter in self.adapters.items() if self.states_adapters else ():
            states |= self._sharded(f"{prefix}{ADAPTERS}{name}.", adapter, metadata["dp_cp_group"])
        return states

    def _sharded(self, prefix: str, adapter: AdapterMatrices, replicas: Any) -> dict[str, Any]:
        """Return one adapter's part. ``replicas`` are the data-parallel ranks (mcore corrects them for experts)."""
        states = {}
        for part in filter(None, adapter.parts):
            for side in part.sides:
                split, matrices = self.split_of(part, side), adapter.lora_A if side == "A" else adapter.lora_B
                key, matrix = f"{prefix}{matrix_name(part.name, side)}", matrices[part.key]
                groups = {"tp_group": self.group, "dp_cp_group": replicas}
                if split is None:
                    sharded = make_sharded_tensor_for_checkpoint(matrix, key, **groups)
                else:
                    # Another layout may pad the vocabulary differently.
                    padded = part.padded is not None
                    sharded = make_tp_sharded_tensor_for_checkpoint(
                        matrix, key, split, allow_shape_mismatch=padded, **groups
                    )
                states[f"{prefix}lora_{side}.{part.key}"] = sharded
        return states


def _below_base(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before loading, move all names that belong to no adapter below ``base_layer.``."""
    for name in [key for key in state_dict if key.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith((ADAPTERS, BASE)):
            state_dict[f"{prefix}{BASE}{rest}"] = state_dict.pop(name)


def of_adapter(name: str) -> bool:
    """Return True if a name in a model's state dict belongs to an adapter's matrix."""
    *_, owner, _, side, _ = ("", "", "", *name.split("."))
    return owner == ADAPTERS.rstrip(".") and side in ("lora_A", "lora_B")


def adapters_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters' entries of a model's state dict, plain or sharded, for checkpoints without the base.

    Load such a checkpoint with ``strict=False``.
    """
    return {name: value for name, value in state_dict.items() if of_adapter(name)}


def accept_base_alone(model: torch.nn.Module) -> None:
    """Let a model load a state dict without any adapter. A state dict with only a part of the adapters still raises."""
    model.register_load_state_dict_post_hook(_accept_base_alone)


def _accept_base_alone(model: torch.nn.Module, incompatible: Any) -> None:
    absent = [name for name in incompatible.missing_keys if of_adapter(name)]
    matrices = sum(len(layer.adapters.state_dict()) for layer in model.modules() if isinstance(layer, WithBaseNames))
    missing = incompatible.missing_keys
    if absent and len(absent) == matrices:
        missing = [name for name in missing if not of_adapter(name)]
        if any(layer.states_adapters for layer in model.modules() if isinstance(layer, WithBaseNames)):
            logger.warning(
                "the state dict that was loaded has no adapter; the model's %d matrices are as before", matrices
            )
    incompatible.missing_keys[:] = [name.replace(f".{BASE}", ".") for name in missing]
