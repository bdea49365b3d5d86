# SPDX-License-Identifier: Apache-2.0
"""Measure the errors of the kernels that add an adapter's update, beside torch's own operations, against float64."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F

from tests.helpers import heads as heads_reference
from tests.helpers.row_kernels import EPS, Errors

TOKENS, SCALE = 75, 1.7
# Width of the result; ranks of the adapters of the first and of the second linear, 0 for none.
SHAPES = [(384, 32, 16), (200, 5, 0), (130, 0, 40), (96, 16, 16), (1024, 48, 64)]
Tensors = list[torch.Tensor]


def swiglu_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return each result's relative error against float64: the kernel's, and that of torch in the same dtype."""
    from megarl.model.layers.kernels import adapted_swiglu as kernels
    from megarl.model.layers.updates import Part, Update

    wide = (width, first)
    given = _draw(dtype, device, (TOKENS, 1, 2 * width), (TOKENS, 1, 2 * first), wide, wide, (second, width))

    def ours(fused: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        of_gate, of_up, matrix = matrices
        update = Update(low, (Part(of_gate, 0, SCALE), Part(of_up, first, -0.5))) if first else None
        with mock.patch.object(kernels, "BOTH_PROGRAMS", 4):  # so that a program has several steps
            out, projected = kernels.adapted_swiglu(fused, update, matrix if second else None)
        return [out] if projected is None else [out, projected]

    def theirs(fused: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        (gate, up), (of_gate, of_up, matrix) = fused.chunk(2, dim=-1), matrices
        gate = gate + SCALE * (low[..., :first] @ of_gate.t())
        out = F.silu(gate) * (up - 0.5 * (low[..., first:] @ of_up.t()))
        return [out, F.linear(out, matrix)] if second else [out]

    return _errors(given, ours, theirs)


def heads_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of what lies between the qkv projection and attention; ranks ``first`` and ``second``."""
    from megarl.model.layers.kernels.adapted_heads import prepare_adapted_heads
    from megarl.model.layers.updates import Part, Update

    heads = heads_reference.LAYOUTS[width % len(heads_reference.LAYOUTS)]
    heads = heads if heads.head_dim >= 32 else heads_reference.LAYOUTS[0]
    kv = heads.groups * heads.head_dim
    ranks, rows = (first, second, max(first, second)), (kv * heads.queries, kv, kv)
    shapes = [(rows[i], ranks[i]) for i in range(3)]
    fused, low, *others = _draw(dtype, device, (TOKENS, 1, sum(rows)), (TOKENS, 1, sum(ranks)), *shapes)
    weights = tuple(1 + 0.3 * weight for weight in _draw(dtype, device, *[(heads.head_dim,)] * 2)) if first else None
    angles = 53.0 * torch.rand(TOKENS, 1, 1, heads.head_dim // 2, device=device).repeat(1, 1, 1, 2)
    # Of equal ranks, queries and keys read the same columns.
    starts = (0, first if first != second else 0, first + second)
    scales = (SCALE, SCALE, -0.5 if second else SCALE)

    def ours(fused: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        places = zip(matrices, starts, scales, ranks, strict=True)
        parts = tuple(Part(matrix, start, scale) if rank else None for matrix, start, scale, rank in places)
        return list(prepare_adapted_heads(fused, angles, weights, EPS, heads, Update(low, parts)))

    def theirs(fused: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        grouped = []
        for matrix, start, scale, rank in zip(matrices, starts, scales, ranks, strict=True):
            added = scale * (low[..., start : start + rank] @ matrix.t())
            grouped.append(added.view(TOKENS, 1, heads.groups, -1))
        return heads_reference.reference(
            fused + torch.cat(grouped, dim=-1).flatten(-2), angles, weights, heads, fused.dtype
        )

    return _errors([fused, low, *others], ours, theirs)


def residual_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of the sum with the residual stream, of rank ``first``."""
    from megarl.model.layers.kernels.residual import add_adapted
    from megarl.model.layers.updates import Part, Update

    rank = first or second
    given = _draw(dtype, device, (TOKENS, 1, width), (TOKENS, 1, width), (TOKENS, 1, rank), (width, rank))

    def ours(residual: torch.Tensor, out: torch.Tensor, low: torch.Tensor, wide: torch.Tensor) -> Tensors:
        return [add_adapted(residual, out, Update(low, (Part(wide, 0, SCALE),)))]

    def theirs(residual: torch.Tensor, out: torch.Tensor, low: torch.Tensor, wide: torch.Tensor) -> Tensors:
        return [residual + (out + SCALE * (low @ wide.t()))]

    return _errors(given, ours, theirs)


def through_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of a product with A, of the sum of both ranks, and of what comes back through it."""
    from megarl.lora.layers.products import project_through

    def theirs(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return [hidden * 1.0, F.linear(hidden, matrix)]

    def ours(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        through, low = project_through(hidden, matrix)
        return [through * 1.0, low]

    return _errors(_draw(dtype, device, (TOKENS, 1, width), (first + second, width)), ours, theirs)


def beside_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of RMSNorm beside the residual stream."""
    from megarl.model.layers.kernels.norm import rms_norm_beside

    weight = torch.linspace(-0.5, 2.0, width, device=device).to(dtype)

    def ours(hidden: torch.Tensor) -> Tensors:
        return list(rms_norm_beside(hidden, weight, EPS))

    def theirs(hidden: torch.Tensor) -> Tensors:
        return [F.rms_norm(hidden, (width,), weight.to(hidden.dtype), EPS), hidden]

    return _errors(_draw(dtype, device, (TOKENS, 1, width)), ours, theirs)


def norm_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of RMSNorm in front of a linear with an A of the sum of both ranks."""
    from megarl.model.layers.kernels import adapted_norm as kernels

    weight = torch.linspace(-0.5, 2.0, width, device=device).to(dtype)

    def ours(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        with mock.patch.object(kernels, "COLUMNS", 64):  # so that a program has several steps
            outs = kernels.rms_norm_projected(hidden, weight, EPS, matrix)
        return [out * 1.0 for out in outs]

    def theirs(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        normed = F.rms_norm(hidden, (width,), weight.to(hidden.dtype), EPS)
        # What comes back through A is the linear's affair.
        return [normed, F.linear(normed.detach(), matrix), hidden]

    return _errors(_draw(dtype, device, (TOKENS, 1, width), (first + second, width)), ours, theirs)


def linear_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of a frozen linear beside an A of the sum of both ranks, whose gradients lie in one piece."""
    from megarl.lora.layers.beside import _LinearBeside, with_rows_behind
    from megarl.lora.layers.products import project
    from tests.helpers.in_one_piece import InOnePiece

    rank, out = first + second, 64
    [weight] = _draw(dtype, device, (out, width))
    joined = torch.nn.Parameter(weight.clone(), requires_grad=False)
    room = with_rows_behind(joined, rank)
    assert (room is None) == (rank % 8 > 0) and torch.equal(joined, weight)

    def ours(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return list(InOnePiece.apply(*_LinearBeside.apply(hidden, project(hidden, matrix), joined, matrix, room)))

    def theirs(hidden: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return [F.linear(hidden, weight.to(hidden.dtype)), F.linear(hidden, matrix)]

    return _errors(_draw(dtype, device, (TOKENS, 1, width), (rank, width)), ours, theirs)


def sum_norm_errors(width: int, first: int, second: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of the sum with the residual stream, of rank ``first``, and its norm in front of an A."""
    from megarl.model.layers.kernels import adapted_norm as kernels
    from megarl.model.layers.updates import Part, Update

    rank, weight = first or second, torch.linspace(-0.5, 2.0, width, device=device).to(dtype)
    shapes = (TOKENS, 1, width), (TOKENS, 1, width), (TOKENS, 1, rank), (width, rank), (first + second, width)

    def ours(
        residual: torch.Tensor, out: torch.Tensor, low: torch.Tensor, wide: torch.Tensor, a: torch.Tensor
    ) -> Tensors:
        with mock.patch.object(kernels, "COLUMNS", 64):
            outs = kernels.add_and_norm(residual, out, Update(low, (Part(wide, 0, SCALE),)), weight, EPS, a)
        return [one * 1.0 for one in outs]

    def theirs(
        residual: torch.Tensor, out: torch.Tensor, low: torch.Tensor, wide: torch.Tensor, a: torch.Tensor
    ) -> Tensors:
        total = residual + (out + SCALE * (low @ wide.t()))
        normed = F.rms_norm(total, (width,), weight.to(total.dtype), EPS)
        return [normed, F.linear(normed.detach(), a), total]

    return _errors(_draw(dtype, device, *shapes), ours, theirs)


def _draw(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(*shape, device=device, generator=generator).to(dtype) for shape in shapes]


def _errors(given: Tensors, ours: Callable[..., Tensors], theirs: Callable[..., Tensors]) -> Errors:
    dtype = given[0].dtype

    def run(compute: Callable[..., Tensors], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in given]
        outs = compute(*leaves)
        slopes = _draw(given[0].dtype, str(given[0].device), *(out.shape for out in outs))
        gradients = torch.autograd.grad(outs, leaves, [slope.to(dtype) for slope in slopes], allow_unused=True)
        named = {f"output {place}": out for place, out in enumerate(outs)}
        named |= {f"gradient {place}": g for place, g in enumerate(gradients) if g is not None and g.numel()}
        return {name: tensor.detach().double() for name, tensor in named.items()}

    mine, other, exact = run(ours, dtype), run(theirs, dtype), run(theirs, torch.float64)
    return {name: (_error(mine[name], exact[name]), _error(other[name], exact[name])) for name in exact}


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).norm() / max(exact.norm(), torch.finfo(torch.float32).tiny))


MEASURES = (
    swiglu_errors,
    heads_errors,
    residual_errors,
    beside_errors,
    through_errors,
    norm_errors,
    linear_errors,
    sum_norm_errors,
)
