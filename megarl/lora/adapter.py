"""A LoRA adapter that has been put on a model: names, switch, save, load, export."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from megarl.lora import peft_io
from megarl.lora.layers import ColumnParallelLora, ParallelLoraLinear
from megarl.lora.merge import merge_weight
from megarl.lora.peft_io import PREFIX
from megarl.model.families.base import Family
from megarl.model.sharding import ShardedTensor, parameter_view, stream_full
from megarl.parallel.groups import Groups


class LoraAdapter:
    """Handle returned by ``apply_lora``.

    Attributes:
        layers: the wrapped linears on this rank.
        config: the PEFT config it was made from.
    """

    def __init__(
        self, layers: list[ParallelLoraLinear], config: LoraConfig, family: Family, num_layers: int, groups: Groups
    ) -> None:
        self.layers = layers
        self.config = config
        self.family = family
        self.num_layers = num_layers
        self.groups = groups

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(PEFT name, parameter)`` of this rank's matrices, in the order of ``tensors()``."""
        return [
            (f"{PREFIX}{part.name}.lora_{side}.weight", matrices[part.key])
            for layer in self.layers
            for part in filter(None, layer.parts)
            for side, matrices in (("A", layer.lora_A), ("B", layer.lora_B))
        ]

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]:
        """This rank's matrices as sharded tensors under PEFT's file names.

        Args:
            values: PEFT name -> tensor shaped like the parameter, to be handled in its place (optimizer moments, fp32
                main weights, gradients).
        """
        tensors = []
        for layer in self.layers:
            column = isinstance(layer, ColumnParallelLora)
            for part in filter(None, layer.parts):
                shapes = {"A": (part.rank, part.in_features), "B": (part.out_features, part.rank)}
                dims = {"A": None if column else 1, "B": 0 if column else None}
                for side, matrices in (("A", layer.lora_A), ("B", layer.lora_B)):
                    name = f"{PREFIX}{part.name}.lora_{side}.weight"
                    data = matrices[part.key].data if values is None else values[name]
                    tensors.append(parameter_view(name, data, shapes[side], dims[side]))
        return tensors

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model alone; nothing is merged or copied."""
        before = [layer.enabled for layer in self.layers]
        for layer in self.layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer, enabled in zip(self.layers, before, strict=True):
                layer.enabled = enabled

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every matrix of the whole adapter, in PEFT's names, on every rank. Collective over TP and PP."""
        return stream_full(self.tensors(), self.groups)

    def merged(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]:
        """Base tensors with this adapter added when they are read: in fp32, rounded once, out of place.

        Args:
            tensors: this rank's base tensors under Hugging Face names.
        """
        updates = {
            f"{part.name}.weight": (layer.lora_A[part.key], layer.lora_B[part.key], part.scaling)
            for layer in self.layers
            for part in filter(None, layer.parts)
        }
        return [_with_update(t, *updates[t.name]) if t.name in updates else t for t in tensors]

    def adapter_config(self) -> dict[str, Any]:
        """The contents of ``adapter_config.json``."""
        return peft_io.config_dict(self.config, self.family, self.num_layers)

    def save(self, path: str | Path) -> None:
        """Write a PEFT directory. Collective; rank 0 writes, atomically.

        Raises:
            AdapterError: the directory cannot be written.
        """
        peft_io.save(path, self.export(), self.adapter_config())

    def load(self, path: str | Path) -> None:
        """Read a PEFT directory made at any layout, or by PEFT; each rank reads only its slices.

        Raises:
            AdapterError: truncated file, missing or unexpected tensor, wrong shape, or other targets, rank or alpha
                than this adapter's. Nothing is changed then.
        """
        peft_io.load(path, self)


def _with_update(base: ShardedTensor, matrix_a: torch.Tensor, matrix_b: torch.Tensor, scaling: float) -> ShardedTensor:
    """``base`` whose ``read`` adds ``scaling * B @ A``; this rank's slices of A and B give this rank's slice."""

    def read() -> torch.Tensor:
        return merge_weight(base.read(), matrix_a, matrix_b, scaling)

    return dataclasses.replace(base, read=read)
