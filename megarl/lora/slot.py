# SPDX-License-Identifier: Apache-2.0
"""Describe one adapted part of a linear: its matrices on this rank, their names and shapes in PEFT's file."""

import dataclasses
from functools import cached_property

import torch

from megarl.lora.layers.matrices import AdapterMatrices, PartPlan
from megarl.lora.layers.parallel_linear import ParallelLoraLinear
from megarl.peft.names import matrix_name

# A matrix's PEFT name, the parameters of its module, and its name among them.
Held = tuple[str, dict[str, torch.nn.Parameter], str]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One adapted part of a linear on this pipeline stage.

    Attributes:
        part: plan of the part: name, rank, sizes.
        kind: class of the adapter layer.
        layer: the wrapped linear; None if another expert-parallel rank holds it.
        adapter: the adapter's matrices in that layer; None likewise.
    """

    part: PartPlan
    kind: type[ParallelLoraLinear]
    layer: ParallelLoraLinear | None
    adapter: AdapterMatrices | None

    def matrices(self) -> dict[str, torch.nn.Parameter]:
        """Map PEFT names to this rank's matrices; empty if another rank holds them."""
        return {name: held[key] for name, held, key in self.held}

    @cached_property
    def held(self) -> list[Held]:
        """Each matrix's PEFT name, the parameters of its module, and its name among them.

        A sync asks for all matrices, of which a mixture has tens of thousands; ``ParameterDict`` needs 5 microseconds
        for one.
        """
        if self.adapter is None:
            return []
        held = {"A": self.adapter.lora_A._parameters, "B": self.adapter.lora_B._parameters}
        return [(self.name(side), held[side], self.part.key) for side in self.part.sides]

    def name(self, side: str) -> str:
        """Return PEFT's name of A or B in the weights file."""
        return matrix_name(self.part.name, side)

    def shapes(self) -> dict[str, tuple[tuple[int, int], int | None]]:
        """Map PEFT names to (shape in the file, dimension that is split over the kind's axis)."""
        part = self.part
        shapes = {
            "A": ((part.rank, part.in_features), self.kind.split_of(part, "A")),
            "B": ((part.out_features, part.rank), self.kind.split_of(part, "B")),
        }
        return {self.name(side): shapes[side] for side in part.sides}
