# SPDX-License-Identifier: Apache-2.0
"""State dicts of adapted models: the base under the names it had before, adapters beside it.

A checkpoint of the base, plain or distributed, fits the model with and without adapters. An adapter's matrix lies
below the linear that it adapts: ``...linear_qkv.adapters.default.lora_A.q_proj`` in a state dict. In a distributed
checkpoint its key ends in PEFT's name of the matrix: mcore stacks equal layers in one tensor, but adapters may differ
by layer.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from megarl.lora.layers.matrices import AdapterMatrices
from megarl.peft.names import matrix_name

# The children of a wrapped linear.
BASE, ADAPTERS = "base_layer.", "adapters."

logger = logging.getLogger(__name__)


class WithBaseNames(torch.nn.Module):
    """A module with the children ``base_layer`` and ``adapters``, whose state dict gives the former its own names.

    Attributes:
        states_adapters: state dicts hold the adapters too.
    """

    states_adapters = True

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_below_base)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """torch's, without ``base_layer.`` in names."""
        found = self.base_layer.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.states_adapters:
            self.adapters.state_dict(destination=found, prefix=f"{prefix}{ADAPTERS}", keep_vars=keep_vars)
        return found

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """mcore's, of a distributed checkpoint; saves and loads at different layouts fit each other."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        found = dict(self.base_layer.sharded_state_dict(prefix, sharded_offsets, metadata))
        for name, own in self.adapters.items() if self.states_adapters else ():
            found |= self._sharded(f"{prefix}{ADAPTERS}{name}.", own, metadata["dp_cp_group"])
        return found

    def _sharded(self, prefix: str, own: AdapterMatrices, replicas: Any) -> dict[str, Any]:
        """One adapter's part; ``replicas`` are the data-parallel ranks (mcore corrects it for experts)."""
        found = {}
        for part in filter(None, own.parts):
            for side in part.sides:
                split, matrices = self.split_of(part, side), own.lora_A if side == "A" else own.lora_B
                key, matrix = f"{prefix}{matrix_name(part.name, side)}", matrices[part.key]
                groups = {"tp_group": self.group, "dp_cp_group": replicas}
                if split is None:
                    sharded = make_sharded_tensor_for_checkpoint(matrix, key, **groups)
                else:
                    # Another layout may pad the vocabulary to another size.
                    padded = part.padded is not None
                    sharded = make_tp_sharded_tensor_for_checkpoint(
                        matrix, key, split, allow_shape_mismatch=padded, **groups
                    )
                found[f"{prefix}lora_{side}.{part.key}"] = sharded
        return found


def _below_base(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before loading: what belongs to no adapter is the base layer's."""
    for name in [key for key in state_dict if key.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith((ADAPTERS, BASE)):
            state_dict[f"{prefix}{BASE}{rest}"] = state_dict.pop(name)


def of_adapter(name: str) -> bool:
    """Whether a name in a model's state dict is an adapter matrix's."""
    *_, owner, _, side, _ = ("", "", "", *name.split("."))
    return owner == ADAPTERS.rstrip(".") and side in ("lora_A", "lora_B")


def adapters_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a model's state dict, plain or sharded, that are adapters': for checkpoints without the base.

    Load what they hold with ``strict=False``.
    """
    return {name: value for name, value in state_dict.items() if of_adapter(name)}


def accept_base_alone(model: torch.nn.Module) -> None:
    """Let a model load a state dict that has no adapter at all; one that lacks a part of them is still an error."""
    model.register_load_state_dict_post_hook(_accept_base_alone)


def _accept_base_alone(model: torch.nn.Module, incompatible: Any) -> None:
    absent = [name for name in incompatible.missing_keys if of_adapter(name)]
    held = sum(len(layer.adapters.state_dict()) for layer in model.modules() if isinstance(layer, WithBaseNames))
    kept = incompatible.missing_keys
    if absent and len(absent) == held:
        kept = [name for name in kept if not of_adapter(name)]
        if any(layer.states_adapters for layer in model.modules() if isinstance(layer, WithBaseNames)):
            logger.warning("the state dict that was loaded has no adapter; the model's %d matrices are as before", held)
    incompatible.missing_keys[:] = [name.replace(f".{BASE}", ".") for name in kept]
