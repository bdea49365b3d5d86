# SPDX-License-Identifier: Apache-2.0
"""One adapter's matrices in one layer."""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class PartPlan:
    """One adapted part of a (fused) linear.

    Attributes:
        name: Hugging Face module path (``model.layers.0.self_attn.q_proj``).
        rank: r.
        scaling: alpha / r, or alpha / sqrt(r).
        in_features, out_features: of the whole part.
        rows: of the part on this rank.
        owner: the expert-parallel rank that holds it; None if all do.
        padded: of a vocabulary: its size with padding.
        copies: neighbouring ranks whose rows are the same (KV heads, where there are more ranks than heads). B is whole
            on every rank then.
        shares: ``key`` of the part of the same layer whose A it uses; None if it has its own.
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
        """Last component of the name, unique within the layer (``q_proj``)."""
        return self.name.rpartition(".")[2]

    @property
    def sides(self) -> str:
        """The matrices that are its own: ``"AB"``, or ``"B"`` where A is another part's."""
        return "B" if self.shares else "AB"


class _Matrices(torch.nn.ParameterDict):
    """Matrices by key. mcore's DDP waits for gathered weights in a hook before the forward pass of their module, so
    this has one."""

    __call__ = torch.nn.Module.__call__  # torch's dictionary refuses calls

    def forward(self) -> None:
        """Nothing."""


class AdapterMatrices(torch.nn.Module):
    """This rank's A and B of each part of a layer that one adapter adapts.

    Attributes:
        parts: one per part of the layer; None where the adapter leaves it alone.
        places, keys, ranks, scalings: of the parts that it adapts, in order; a place is an index in ``parts``, a key
            ``PartPlan.key``.
        starts: of these parts: the first column in what ``lower`` gives; parts that share A have the same.
        dropout: probability, on the adapter's input.
        lora_A, lora_B: ``PartPlan.key`` -> matrix.
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
        self.lora_A = _Matrices()
        self.lora_B = _Matrices()

    def forward(self) -> "AdapterMatrices":
        """Itself. Layers take the matrices by a call, so that hooks which wait for new weights have run."""
        self.lora_A()
        self.lora_B()
        return self

    def wait(self) -> None:
        """Let mcore's DDP finish a gather of updated weights (``overlap_param_gather``) that it left to the next
        forward pass. A collective over the data-parallel ranks, if there is one; nothing otherwise."""
        for matrices in (self.lora_A, self.lora_B):
            if matrices._forward_pre_hooks:
                matrices()

    @property
    def only(self) -> PartPlan:
        """The part of a layer that has one."""
        (part,) = self.parts
        assert part is not None  # a layer of one part holds no adapter that leaves it alone
        return part

    def lower(self, inputs: torch.Tensor) -> torch.Tensor:
        """Every part's A in one product: ``[..., I]`` -> ``[..., sum of ranks]``."""
        return F.linear(inputs, self.matrix_a())

    def matrix_a(self) -> torch.Tensor:
        """Every A, one below the other: ``[sum of ranks, I]``."""
        matrices = [self.lora_A[key] for key in self.keys if key in self.lora_A]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def a_of(self, part: PartPlan) -> torch.nn.Parameter:
        """The A that a part uses, its own or a shared one."""
        return self.lora_A[part.shares or part.key]

    def matrices_b(self) -> list[torch.Tensor]:
        """Every part's B."""
        return [self.lora_B[key] for key in self.keys]

    def raised(self, low: torch.Tensor) -> torch.Tensor:
        """``[..., r]`` -> ``[..., O]``: the scaled B of a layer that has one part."""
        return F.linear(low, self.lora_B[self.only.key]) * self.only.scaling

    def extra_repr(self) -> str:
        return ", ".join(f"{part.key}: r={part.rank}" for part in self.parts if part)


def _starts(adapted: list[PartPlan]) -> tuple[int, ...]:
    """The first column of each part's A among all of a layer."""
    found: dict[str, int] = {}
    end = 0
    for part in adapted:
        found[part.key] = found[part.shares] if part.shares else end
        end += 0 if part.shares else part.rank
    return tuple(found.values())


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator of its own for each module and seed, the same on every rank and at every layout."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
