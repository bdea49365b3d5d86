# SPDX-License-Identifier: Apache-2.0
"""Compute overlapped linears on ranks, and compare them with products of whole matrices."""

import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.lora.layers import overlapped
from megarl.lora.layers.products import Layout
from megarl.model.weights.fusion import HeadLayout
from megarl.parallel import token_exchange
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.parallel.token_exchange import Fill, Use, Whole
from megarl.verify.compare import relative_error

# Tokens of a rank, inputs and outputs of the whole linear, ranks and scalings of two fused parts.
TOKENS, INPUTS, OUTPUTS, RANKS, SCALINGS = 24, 16, 32, (8, 16), (0.5, 2.0)


class RankByRank(Whole):
    """Uses and fills the tokens rank by rank, in another order on each rank, as GPUs that read each other do."""

    def gather(self, wide: torch.Tensor, narrow: torch.Tensor, use: Use) -> torch.Tensor:
        def parts(places: slice, every: torch.Tensor, low: torch.Tensor) -> None:
            for rows in self._parts(len(every)):
                use(rows, every[rows], low[rows])

        return super().gather(wide, narrow, parts)

    def scatter(self, fill: Fill, like: torch.Tensor, tokens: int, features: int) -> torch.Tensor:
        def parts(places: slice, out: torch.Tensor) -> None:
            for rows in self._parts(len(out)):
                fill(rows, out[rows])

        return super().scatter(parts, like, tokens, features)

    def _parts(self, tokens: int) -> list[slice]:
        count, ranks = tokens // self._group.size(), self._group.size()
        order = [(self._group.rank() + step) % ranks for step in range(ranks)]
        return [slice(rank * count, (rank + 1) * count) for rank in order]


def exchange_rank_by_rank() -> None:
    """Let the linears of this process exchange tokens so."""
    overlapped.exchange_of = lambda group, like, work: RankByRank(group)


def compute_linears(ranks: int, by_rank: bool, dtype: torch.dtype = torch.float64) -> tuple[str, dict[str, float]]:
    """On each rank: how tokens are exchanged, and the errors of both linears' outputs and gradients."""
    if by_rank:
        exchange_rank_by_rank()
    token_exchange.LEAST_WORK = 0
    groups = init_groups(ParallelConfig(tensor=ranks), pick_device("auto"), seed=0)
    group, rank = groups.tensor, groups.tensor_rank
    layout = Layout((0, 1), RANKS, SCALINGS, "gated", HeadLayout(1, 1, 1))
    draw = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype).to(groups.device).requires_grad_()

    def slice_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.detach().chunk(ranks, dim)[rank].clone().requires_grad_()

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        """This rank's outputs of both fused parts."""
        return torch.cat([part.chunk(ranks, -1)[rank] for part in tensor.chunk(2, -1)], -1)

    hidden, weight = drawn(TOKENS * ranks, 1, INPUTS), drawn(OUTPUTS, INPUTS).detach()
    matrix_a, slope = drawn(sum(RANKS), INPUTS), drawn(TOKENS * ranks, 1, OUTPUTS).detach()
    matrices = [drawn(OUTPUTS // 2, r) for r in RANKS]
    lows = (hidden @ matrix_a.t()).split(RANKS, -1)
    deltas = [low @ matrix.t() * scaling for low, matrix, scaling in zip(lows, matrices, SCALINGS, strict=True)]
    out = hidden @ weight.t() + torch.cat(deltas, -1)
    out.backward(slope)

    found: dict[str, float] = {}
    mine, whole_a, rows = slice_of(hidden, 0), matrix_a.detach().clone().requires_grad_(), []
    rows = [slice_of(matrix, 0) for matrix in matrices]
    local = halves(weight.t()).t().contiguous()
    result = overlapped.column_linear(mine, local, whole_a, rows, layout, group)
    result.backward(halves(slope))
    dist.all_reduce(whole_a.grad)  # of this rank's tokens alone
    found["column output"] = relative_error(result.detach(), halves(out.detach()))
    found["column hidden"] = relative_error(mine.grad, hidden.grad.chunk(ranks)[rank])
    found["column A"] = relative_error(whole_a.grad, matrix_a.grad)
    for number, (row, matrix) in enumerate(zip(rows, matrices, strict=True)):
        found[f"column B {number}"] = relative_error(row.grad, matrix.grad.chunk(ranks)[rank])

    mine, columns = slice_of(hidden, 2), slice_of(matrix_a, 1)
    wholes = [matrix.detach().clone().requires_grad_() for matrix in matrices]
    local = weight.chunk(ranks, 1)[rank].contiguous()
    result = overlapped.row_linear(mine, local, columns, wholes, layout, group)
    result.backward(slope.chunk(ranks)[rank])
    found["row output"] = relative_error(result.detach(), out.detach().chunk(ranks)[rank])
    found["row hidden"] = relative_error(mine.grad, hidden.grad.chunk(ranks, 2)[rank])
    found["row A"] = relative_error(columns.grad, matrix_a.grad.chunk(ranks, 1)[rank])
    for number, (whole, matrix) in enumerate(zip(wholes, matrices, strict=True)):
        dist.all_reduce(whole.grad)  # of this rank's tokens alone
        found[f"row B {number}"] = relative_error(whole.grad, matrix.grad)
    return type(overlapped.exchange_of(group, mine, 0)).__name__, found
