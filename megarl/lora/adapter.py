"""A LoRA adapter that has been put on a model: names, switch, save, load, export."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from megarl.lora import peft_io
from megarl.lora.layers import ParallelLoraLinear, PartPlan
from megarl.lora.merge import merge_weight
from megarl.lora.targets import matrix_name, resolve_targets, unties
from megarl.model.families import WeightMap
from megarl.model.sharding import ShardedTensor, collect, parameter_view, placed
from megarl.model.streaming import stream_full
from megarl.parallel.groups import Groups, on_rank_zero


@dataclasses.dataclass(frozen=True)
class Slot:
    """One adapted part of a layer on this pipeline stage.

    Attributes:
        part: what is adapted.
        kind: the class of its layer.
        layer: the wrapped linear; None where another expert-parallel rank has it.
    """

    part: PartPlan
    kind: type[ParallelLoraLinear]
    layer: ParallelLoraLinear | None

    def matrices(self) -> dict[str, torch.nn.Parameter]:
        """PEFT name -> this rank's matrix; empty where another rank has it."""
        if self.layer is None:
            return {}
        return {self.name("A"): self.layer.lora_A[self.part.key], self.name("B"): self.layer.lora_B[self.part.key]}

    def name(self, side: str) -> str:
        """PEFT's name of A or B in the weights file."""
        return matrix_name(self.part.name, side)

    def shapes(self) -> dict[str, tuple[tuple[int, int], int | None]]:
        """PEFT name -> (shape in the file, dimension split over the kind's axis)."""
        part = self.part
        return {
            self.name("A"): ((part.rank, part.in_features), self.kind.split_A),
            self.name("B"): ((part.out_features, part.rank), self.kind.split_B),
        }


class LoraAdapter:
    """Handle returned by ``apply_lora``.

    Attributes:
        slots: the adapted parts of this rank's pipeline stage, those of experts on other ranks included.
        config: the PEFT config it was made from.
        names: the model's names.
        dtype: of the matrices.
        groups: this rank's place.
    """

    def __init__(
        self, slots: list[Slot], config: LoraConfig, names: WeightMap, dtype: torch.dtype, groups: Groups
    ) -> None:
        self.slots = slots
        self.config = config
        self.names = names
        self.dtype = dtype
        self.groups = groups

    @property
    def layers(self) -> list[ParallelLoraLinear]:
        """The wrapped linears on this rank, each once."""
        return list(dict.fromkeys(slot.layer for slot in self.slots if slot.layer is not None))

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(PEFT name, parameter)`` of this rank's matrices, in the order of ``tensors()``."""
        return [named for slot in self.slots for named in slot.matrices().items()]

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]:
        """The stage's matrices as sharded tensors under PEFT's file names, those held elsewhere included.

        Args:
            values: PEFT name -> tensor shaped like the parameter, to be handled in its place (optimizer moments, fp32
                main weights, gradients).
        """
        dtype = self.dtype if values is None else torch.float32
        tensors = []
        for slot in self.slots:
            matrices = slot.matrices()
            for name, (shape, dim) in slot.shapes().items():
                if name in matrices:
                    data = matrices[name].data if values is None else values[name]
                else:
                    data = torch.empty(0, shape[1], dtype=dtype)
                tensor = parameter_view(name, data, shape, dim)
                if dim is not None:
                    tensor = dataclasses.replace(tensor, padded=slot.part.padded)
                tensors.append(placed(tensor, slot.kind.axis, slot.part.owner, self.groups))
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
        updates = {f"{slot.part.name}.weight": (slot.layer, slot.part) for slot in self.slots if slot.layer is not None}
        return [_with_update(t, *updates[t.name]) if t.name in updates else t for t in tensors]

    @property
    def unties(self) -> bool:
        """Whether ``merged`` needs lm_head's own tensor though the model ties it to the embedding."""
        return unties(self.names.hf_config, resolve_targets(self.config, self.names))

    def adapter_config(self) -> dict[str, Any]:
        """The contents of ``adapter_config.json``."""
        return peft_io.config_dict(self.config, self.names)

    def save(self, path: str | Path) -> None:
        """Write a PEFT directory. Collective; rank 0 writes, atomically.

        Raises:
            AdapterError: the directory cannot be written.
        """
        write = self.snapshot()
        on_rank_zero(lambda: write(Path(path)))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the adapter to rank 0's host memory. Collective.

        Returns:
            For rank 0: writes the copy as a PEFT directory, on any thread and however training went on.
        """
        tensors, config = collect(self.export()), self.adapter_config()
        return lambda path: peft_io.write(path, tensors, config)

    def load(self, path: str | Path) -> None:
        """Read a PEFT directory made at any layout, or by PEFT; each rank reads only its slices.

        Raises:
            AdapterError: truncated file, missing or unexpected tensor, wrong shape, or other targets, rank or alpha
                than this adapter's. Nothing is changed then.
        """
        peft_io.load(path, self)


def _with_update(base: ShardedTensor, layer: ParallelLoraLinear, part: PartPlan) -> ShardedTensor:
    """``base`` whose ``read`` adds ``scaling * B @ A``; for this rank's slice."""

    def read() -> torch.Tensor:
        return merge_weight(base.read(), *layer.factors(part), part.scaling)

    return dataclasses.replace(base, read=read)
