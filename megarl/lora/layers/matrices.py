# SPDX-License-Identifier: Apache-2.0
"""Hold the matrices of one adapter in one layer."""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megarl.parallel.stacks import joined


@dataclass(frozen=True)
class PartPlan:
    """Plan of one adapted part of a (fused) linear.

    Attributes:
        name: Hugging Face module path (``model.layers.0.self_attn.q_proj``).
        rank: LoRA rank r.
        scaling: alpha / r, or alpha / sqrt(r).
        in_features, out_features: sizes of the whole part.
        rows: rows of the part on this rank.
        owner: expert-parallel rank that holds the part; None if all do.
        padded: for a vocabulary, its size with padding; else None.
        copies: number of neighbouring ranks with the same rows (KV heads, where there are more ranks than heads). Every
            rank then holds the whole B.
        shares: ``key`` of the part of the same layer whose A this part uses; None if it has its own.
    """

    name: str
    rank: int
    scaling: float
    in_features: int
    out_features: int
    rows: int
    owner: int | None = None
    padded: int | None = None
    copies: int = 1
    shares: str | None = None

    @property
    def key(self) -> str:
        """Last component of the name (``q_proj``), unique within the layer."""
        return self.name.rpartition(".")[2]

    @property
    def sides(self) -> str:
        """The matrices that belong to the part: ``"AB"``, or ``"B"`` if A is another part's."""
        return "B" if self.shares else "AB"


class _Matrices(torch.nn.ParameterDict):
    """Matrices by key, in a module that can be called.

    mcore's DDP waits for gathered weights in a hook before the forward pass of their module, so the module needs a
    forward.
    """

    __call__ = torch.nn.Module.__call__  # torch's ParameterDict refuses calls

    def forward(self) -> None:
        """Do nothing; calling the module runs its hooks."""


class AdapterMatrices(torch.nn.Module):
    """This rank's A and B of each part of a layer that one adapter adapts.

    Attributes:
        parts: one plan per part of the layer; None for a part that is not adapted.
        places, keys, ranks, scalings: of the adapted parts, in order: index in ``parts``, ``PartPlan.key``, rank,
            scaling.
        starts: first column of each adapted part in the output of ``lower``. Parts that share A have the same.
        columns, factors: of each part of the layer, its start and scaling; -1 and 0 for a part that is not adapted.
        dropout: dropout probability of the adapter's input.
        lora_A, lora_B: maps ``PartPlan.key`` to the matrix.
    """

    def __init__(self, parts: tuple[PartPlan | None, ...], dropout: float) -> None:
        super().__init__()
        self.parts, self.dropout = parts, dropout
        adapted = [(place, part) for place, part in enumerate(parts) if part]
        self.places = tuple(place for place, _ in adapted)
        self.keys = tuple(part.key for _, part in adapted)
        self.ranks = tuple(part.rank for _, part in adapted)
        self.scalings = tuple(part.scaling for _, part in adapted)
        self.starts = _starts([part for _, part in adapted])
        columns, factors = (dict(zip(self.places, values, strict=True)) for values in (self.starts, self.scalings))
        self.columns = tuple(columns.get(place, -1) for place in range(len(parts)))
        self.factors = tuple(factors.get(place, 0.0) for place in range(len(parts)))
        self.lora_A = _Matrices()
        self.lora_B = _Matrices()

    def forward(self) -> "AdapterMatrices":
        """Return itself. Layers take the matrices by this call, so that hooks which wait for new weights have run."""
        self.lora_A()
        self.lora_B()
        return self

    def wait(self) -> None:
        """Finish a gather of updated weights that ``overlap_param_gather`` left to the next forward pass.

        A collective over the data-parallel ranks if there is such a gather; does nothing otherwise.
        """
        for matrices in (self.lora_A, self.lora_B):
            if matrices._forward_pre_hooks:
                matrices()

    @property
    def only(self) -> PartPlan:
        """The plan of a layer that has only one part."""
        (part,) = self.parts
        assert part is not None  # a layer of one part has no adapter that skips it
        return part

    def lower(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply by every part's A in one product: ``[..., I]`` -> ``[..., sum of ranks]``."""
        return F.linear(inputs, self.matrix_a())

    def matrix_a(self) -> torch.Tensor:
        """Return every A, stacked by rows: ``[sum of ranks, I]``."""
        return joined(self.read_together())

    def read_together(self) -> list[torch.nn.Parameter]:
        """Return every A. The optimizer places them one after the other in memory, where it can."""
        return [self.lora_A[key] for key in self.keys if key in self.lora_A]

    def a_of(self, part: PartPlan) -> torch.nn.Parameter:
        """Return the A that a part uses, its own or a shared one."""
        return self.lora_A[part.shares or part.key]

    def matrices_b(self) -> list[torch.Tensor]:
        """Return every part's B."""
        return [self.lora_B[key] for key in self.keys]

    def raised(self, low: torch.Tensor) -> torch.Tensor:
        """Multiply by the scaled B of a layer that has one part: ``[..., r]`` -> ``[..., O]``."""
        # Not through ``only``: its name is the layer's own, and a trace that read it would be that layer's only.
        return F.linear(low, self.lora_B[self.keys[0]]) * self.scalings[0]

    def extra_repr(self) -> str:
        return ", ".join(f"{part.key}: r={part.rank}" for part in self.parts if part)


def _starts(adapted: list[PartPlan]) -> tuple[int, ...]:
    """Return the first column of each part's A among all columns of the layer."""
    starts: dict[str, int] = {}
    end = 0
    for part in adapted:
        starts[part.key] = starts[part.shares] if part.shares else end
        end += 0 if part.shares else part.rank
    return tuple(starts.values())


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return a random generator for each module and seed, the same on every rank and at every layout."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mark_parameter(parameter: torch.nn.Parameter, split_dim: int | None, sequence_parallel: bool) -> None:
    """Set the attributes by which mcore reduces, clips and counts a parameter.

    Args:
        parameter: an adapter matrix.
        split_dim: the dimension that is split over TP; None for a replicated matrix.
        sequence_parallel: True if the TP ranks apply the matrix to different tokens.
    """
    if split_dim is None:
        # Not marked tensor_model_parallel, which would count it once per TP rank in the gradient norm.
        parameter.sequence_parallel = sequence_parallel
        return
    parameter.tensor_model_parallel = True
    parameter.partition_dim = split_dim
    parameter.partition_stride = 1
    parameter.sequence_parallel = False
