"""LoRA (Hu et al., arXiv:2106.09685) around mcore's column- and row-parallel linears.

Shapes: T tokens (T/TP under sequence parallelism), I input and O output features of the whole layer, r rank.
A is [r, I] and B is [O, r] in the PEFT file. Column-parallel: A is replicated, B split along O. Row-parallel: A is
split along I, B replicated. Only the rank-r activations are communicated, never the wide ones. Routers and experts are
in ``experts.py``.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megarl.lora.widen import add_wide
from megarl.model.families.base import Fusion
from megarl.model.fusion import HeadLayout
from megarl.parallel.groups import Axis


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
    """

    name: str
    rank: int
    scaling: float
    in_features: int
    out_features: int
    rows: int
    owner: int | None = None
    padded: int | None = None

    @property
    def key(self) -> str:
        """Last component of the name, unique within the layer (``q_proj``)."""
        return self.name.rpartition(".")[2]


class ParallelLoraLinear(torch.nn.Module):
    """A base linear plus its adapters; a drop-in for the base in mcore's modules.

    ``lora_A[key]`` and ``lora_B[key]`` hold this rank's matrices of each adapted part. Parts that are not adapted add
    nothing. Attributes that mcore reads from a linear (``weight``, ``sequence_parallel``, ...) come from the base.

    Class attributes of each kind: ``split_A`` and ``split_B`` are the dimensions split over the ranks of ``axis``, None
    for a replicated matrix.
    """

    split_A: ClassVar[int | None] = None
    split_B: ClassVar[int | None] = None
    axis: ClassVar[Axis] = "tensor"

    def __init__(
        self,
        base: torch.nn.Module,
        parts: tuple[PartPlan | None, ...],
        fusion: Fusion,
        heads: HeadLayout,
        dropout: float,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.parts, self.fusion, self.heads = parts, fusion, heads
        self.dropout = dropout
        self.group = group
        self.enabled = True
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Base output plus the adapters' part; the bias passes through."""
        out, bias = self.base_layer(hidden, *args, **kwargs)
        return self.adapt(out, hidden) if self.enabled else out, bias

    def adapt(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add the adapters' part to the base's output, whose memory it takes over.

        Args:
            out: what the base made of ``hidden``.
            hidden: what the adapters see.
        """
        raise NotImplementedError

    def lower(self, inputs: torch.Tensor) -> torch.Tensor:
        """Every part's A in one product: ``[..., I]`` -> ``[..., sum of ranks]``."""
        matrices = [self.lora_A[part.key] for part in self.parts if part]
        return F.linear(inputs, matrices[0] if len(matrices) == 1 else torch.cat(matrices))

    def widen(self, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Add every part's scaled B, applied to its columns of ``low``, to ``out``."""
        active = tuple((index, part) for index, part in enumerate(self.parts) if part)
        return add_wide(
            out,
            low,
            [self.lora_B[part.key] for _, part in active],
            tuple(index for index, _ in active),
            tuple(part.scaling for _, part in active),
            self.fusion,
            self.heads,
        )

    def factors(self, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``(A, B)`` whose product is this rank's slice of the part's update."""
        return self.lora_A[part.key], self.lora_B[part.key]

    def initial(self, part: PartPlan, seed: int) -> dict[str, torch.Tensor]:
        """The whole A and B, float32, from the seed and the module's name alone.

        PEFT's: A is ``kaiming_uniform_(a=sqrt(5))``, which is uniform on +-1 / sqrt(in_features); B is zero.
        """
        bound = part.in_features**-0.5
        matrix_a = torch.empty(part.rank, part.in_features)
        matrix_a.uniform_(-bound, bound, generator=generator_of(part.name, seed))
        return {"A": matrix_a, "B": torch.zeros(part.padded or part.out_features, part.rank)}

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Set the attributes by which mcore reduces, clips and counts a matrix."""
        mark_parameter(matrix, split, bool(self.base_layer.sequence_parallel))

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The base layer's, under the name it had before it was wrapped: distributed checkpoints stay the base's."""
        return self.base_layer.sharded_state_dict(prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return ", ".join(f"{part.key}: r={part.rank}" for part in self.parts if part)


class ColumnParallelLora(ParallelLoraLinear):
    """Adapter of a layer whose outputs are split over TP; under SP its input is split along the sequence."""

    split_B = 0

    def adapt(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [T, ..., O/TP]``, ``hidden [T/TP or T, ..., I]``."""
        return self.widen(out, self.low(hidden))

    def low(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T/TP or T, ..., I] -> [T, ..., sum of ranks]``, of all tokens on every TP rank."""
        low = self.lower(_dropped(self, hidden))
        if self.base_layer.sequence_parallel:
            # A saw only this rank's tokens: its gradient is summed over TP by the parameter's sequence_parallel mark.
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        return copy_to_tensor_model_parallel_region(low, group=self.group)


class RowParallelLora(ParallelLoraLinear):
    """Adapter of a layer whose inputs are split over TP; under SP its output is split along the sequence."""

    split_A = 1

    def adapt(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``out [T/TP or T, ..., O]``, ``hidden [T, ..., I/TP]``."""
        low = self.lower(_dropped(self, hidden))
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.base_layer.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return self.widen(out, reduce(low, group=self.group))


def _dropped(layer: ParallelLoraLinear, hidden: torch.Tensor) -> torch.Tensor:
    """Dropout on the adapter's input. Where TP ranks hold the same tokens and features they must drop the same ones:
    the default generator, which mcore seeds alike on TP ranks. Where they hold different ones: mcore's tracker."""
    if not (layer.training and layer.dropout > 0.0):
        return hidden
    replicated = isinstance(layer, ColumnParallelLora) and not layer.base_layer.sequence_parallel
    if replicated:
        return F.dropout(hidden, layer.dropout)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return F.dropout(hidden, layer.dropout)


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator of its own for each module and seed, the same on every rank and at every layout."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mark_parameter(parameter: torch.nn.Parameter, split_dim: int | None, sequence_parallel: bool) -> None:
    """Set the attributes by which mcore reduces, clips and counts a parameter.

    Args:
        parameter: an adapter matrix.
        split_dim: the dimension split over TP, or None for a replicated matrix.
        sequence_parallel: whether the ranks of TP see different tokens in it.
    """
    if split_dim is None:
        # No tensor_model_parallel mark: it would be counted once per TP rank in the gradient norm.
        parameter.sequence_parallel = sequence_parallel
        return
    parameter.tensor_model_parallel = True
    parameter.partition_dim = split_dim
    parameter.partition_stride = 1
    parameter.sequence_parallel = False
