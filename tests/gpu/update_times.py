# SPDX-License-Identifier: Apache-2.0
"""Time the kernels that add adapters' products, and the same with products of their own.

`python3 -m tests.gpu.update_times [tiles] [SHAPE ...]`: named shapes of `megarl bench train` (qwen3-0.6b, qwen3-8b).
Prints microseconds of one layer, forward and backward in a CUDA graph, without the linears' bases but where a linear is
named, and milliseconds of all layers that the kernels save. With `tiles` instead: microseconds with other tiles than
those the kernels have.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import triton

from megarl.bench.shapes import SHAPES, Shape
from megarl.lora.layers.beside import linear_beside, with_rows_behind
from megarl.lora.layers.products import Layout, add_wide, project, project_through
from megarl.model.layers.kernels import (
    adapted_heads,
    adapted_norm,
    adapted_swiglu,
    chunk_sums,
    heads,
    narrow_gradients,
    norm,
    residual,
    swiglu,
    through_gradients,
)
from megarl.model.layers.updates import Part, Update
from megarl.model.weights.fusion import HeadLayout
from tests.helpers.in_one_piece import InOnePiece

RANK, SCALE, EPS, DTYPE, DEVICE = 16, 2.0, 1e-6, torch.bfloat16, "cuda"
# Settings of a kernel's module to try.
GRADIENT_NAMES = ("PIECES", "ROWS", "COLUMNS", "WARPS", "STAGES", "PROGRAMS")
GRADIENTS: list[tuple[int, ...]] = [
    (2, 64, 128, 4, 2, 264), (1, 64, 128, 4, 4, 264), (1, 128, 128, 4, 2, 264), (1, 32, 128, 4, 3, 528),
    (1, 64, 128, 8, 3, 264), (2, 32, 128, 4, 3, 264), (1, 64, 128, 4, 3, 396),
]  # fmt: skip
THROUGH_NAMES = ("ROWS", "COLUMNS", "WARPS", "STAGES", "FEWER_STAGES", "PROGRAMS")
THROUGH: list[tuple[int, ...]] = [
    (32, 128, 4, 3, 3, 528), (64, 128, 8, 2, 2, 264), (64, 64, 4, 2, 2, 264), (32, 64, 4, 4, 4, 1056),
]  # fmt: skip
TILES: list[tuple[str, ModuleType, tuple[str, ...], list[tuple[int, ...]]]] = [
    ("heads", adapted_heads, ("ROWS", "WARPS", "STAGES", "PROGRAMS"), [
        (16, 1, 2, 1024), (16, 1, 2, 4096), (16, 1, 2, 8192), (16, 1, 1, 2048), (16, 1, 3, 2048), (16, 2, 2, 4096),
        (32, 2, 2, 1024), (32, 2, 2, 2048), (32, 2, 2, 4096), (32, 4, 1, 1024), (64, 4, 2, 1024),
    ]),
    ("heads", narrow_gradients, GRADIENT_NAMES, GRADIENTS),
    ("residual", narrow_gradients, GRADIENT_NAMES, GRADIENTS),
    ("SwiGLU", adapted_swiglu, ("BOTH_ROWS", "BOTH_COLUMNS", "BOTH_WARPS", "BOTH_STAGES", "BOTH_PROGRAMS"), [
        (32, 64, 2, 2, 4096), (32, 64, 2, 3, 2048), (16, 64, 1, 2, 4096), (16, 128, 1, 2, 4096), (64, 64, 4, 2, 1024),
        (64, 64, 4, 1, 1024),
    ]),
    ("sum and norm", adapted_norm, ("ROWS", "COLUMNS", "WARPS"), [
        (16, 128, 4), (16, 128, 2), (16, 512, 8), (16, 1024, 8), (32, 128, 4), (32, 256, 8),
    ]),
    ("SwiGLU", adapted_swiglu, ("STEP_ROWS", "STEP_COLUMNS", "STEP_WARPS", "PROGRAMS"), [
        (32, 64, 4, 800), (32, 128, 8, 400), (16, 64, 4, 400), (64, 64, 4, 400),
    ]),
    ("norm", through_gradients, THROUGH_NAMES, THROUGH),
    ("SwiGLU", chunk_sums, ("FEW_ROWS", "FEW_WARPS", "COLUMNS"), [(0, 0, 128), (8, 2, 256), (8, 4, 256), (8, 1, 64)]),
    ("heads", narrow_gradients, ("LOW_TILE",), [(512,), (2048,)]),
    ("A of the output", through_gradients, THROUGH_NAMES, THROUGH),
    ("residual", residual, ("ROWS", "COLUMNS", "WARPS"), [(16, 128, 4), (16, 256, 4), (32, 64, 4), (64, 64, 4)]),
]  # fmt: skip
# Calls in a graph, so that a launch of one does not count; replays that are timed.
CALLS, REPLAYS = 10, 7
Tensors = list[torch.Tensor]
Compute = Callable[..., Sequence[torch.Tensor]]


def cases(shape: Shape) -> Iterator[tuple[str, Tensors, Compute, Compute]]:
    """Yield name, inputs, and what computes them by one kernel and by several."""
    tokens, hidden, inner = shape.sequences * shape.length, shape.hidden, shape.inner
    layout = HeadLayout(shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    rows = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    given = draw((tokens, 1, sum(rows)), (tokens, 1, 3 * RANK), *((count, RANK) for count in rows))
    yield "heads", given, *heads_of(tokens, layout)
    given = draw((tokens, hidden), (tokens, hidden), (tokens, RANK), (hidden, RANK), (2 * RANK, hidden))
    yield "sum and norm", given, *summed_norms(hidden)
    given = draw((tokens, 2 * inner), (tokens, 2 * RANK), (inner, RANK), (inner, RANK), (RANK, inner))
    yield "SwiGLU", given, *swiglus(layout)
    yield "norm", draw((tokens, hidden), (3 * RANK, hidden)), *norms(hidden)
    yield "linear beside A", draw((tokens, hidden), (3 * RANK, hidden)), *linears(hidden, sum(rows))
    yield "A of the output", draw((tokens, rows[0]), (RANK, rows[0])), project_through, _TwoProducts.apply
    yield "residual", draw((tokens, hidden), (tokens, hidden), (tokens, RANK), (hidden, RANK)), *sums(layout)


def heads_of(tokens: int, layout: HeadLayout) -> tuple[Compute, Compute]:
    """Return what lies between the projection of q, k and v and attention."""
    angles = torch.rand(tokens, 1, 1, layout.head_dim, device=DEVICE)
    weights = tuple(draw((layout.head_dim,), (layout.head_dim,)))
    qkv = Layout((0, 1, 2), (RANK,) * 3, (SCALE,) * 3, "qkv", layout)

    def fused(states: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        update = Update(low, tuple(Part(one, RANK * place, SCALE) for place, one in enumerate(matrices)))
        return list(adapted_heads.prepare_adapted_heads(states, angles, weights, EPS, layout, update))

    def apart(states: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        wide = add_wide(states, low, matrices, qkv)
        return list(heads.prepare_heads(wide, angles, weights, EPS, layout))

    return fused, apart


def norms(hidden: int) -> tuple[Compute, Compute]:
    """Return the norm in front of the projection of q, k and v, and its product with A."""
    [weight] = draw((hidden,))

    def fused(states: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return list(adapted_norm.rms_norm_projected(states, weight, EPS, matrix))

    def apart(states: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        normed, beside = norm.rms_norm_beside(states, weight, EPS)
        return [normed, project(normed, matrix), beside]

    return fused, apart


def linears(hidden: int, outputs: int) -> tuple[Compute, Compute]:
    """Return a frozen linear beside an A, and the way of both gradients to their input."""
    base = torch.nn.Linear(hidden, outputs, bias=False, device=DEVICE, dtype=DTYPE).requires_grad_(False)
    room = with_rows_behind(base.weight, 3 * RANK)

    def fused(states: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        (out, _), low = linear_beside(base, states, project(states, matrix), matrix, room)
        return list(InOnePiece.apply(out, low))

    def apart(states: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        states, low = project_through(states, matrix)
        return list(InOnePiece.apply(base(states), low))

    return fused, apart


def summed_norms(hidden: int) -> tuple[Compute, Compute]:
    """Return the sum behind attention, the norm in front of the MLP, and its product with A."""
    [weight] = draw((hidden,))

    def fused(stream: torch.Tensor, out: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        update = Update(low, (Part(matrices[0], 0, SCALE),))
        return list(adapted_norm.add_and_norm(stream, out, update, weight, EPS, matrices[1]))

    def apart(stream: torch.Tensor, out: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        total = residual.add_adapted(stream, out, Update(low, (Part(matrices[0], 0, SCALE),)))
        return list(adapted_norm.rms_norm_projected(total, weight, EPS, matrices[1]))

    return fused, apart


def swiglus(layout: HeadLayout) -> tuple[Compute, Compute]:
    """Return SwiGLU between two adapted linears."""
    gated = Layout((0, 1), (RANK,) * 2, (SCALE,) * 2, "gated", layout)

    def fused(states: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        gate, up, behind = matrices
        update = Update(low, (Part(gate, 0, SCALE), Part(up, RANK, SCALE)))
        out, projected = adapted_swiglu.adapted_swiglu(states, update, behind)
        assert projected is not None
        return [out, projected]

    def apart(states: torch.Tensor, low: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
        out = swiglu.swiglu(add_wide(states, low, matrices[:2], gated))
        return list(project_through(out, matrices[2]))

    return fused, apart


class _TwoProducts(torch.autograd.Function):
    """``project_through`` with a gradient of two products."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, matrix)
        return hidden.detach(), F.linear(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, by_hidden: torch.Tensor, by_low: torch.Tensor) -> Any:
        hidden, matrix = ctx.saved_tensors
        by_matrix = by_low.t() @ hidden
        return by_hidden.addmm_(by_low, matrix), by_matrix


def sums(layout: HeadLayout) -> tuple[Compute, Compute]:
    """Return the sum of a linear's output, its update and the residual stream."""
    single = Layout((0,), (RANK,), (SCALE,), "single", layout)

    def fused(stream: torch.Tensor, states: torch.Tensor, low: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return [residual.add_adapted(stream, states, Update(low, (Part(matrix, 0, SCALE),)))]

    def apart(stream: torch.Tensor, states: torch.Tensor, low: torch.Tensor, matrix: torch.Tensor) -> Tensors:
        return [stream + add_wide(states, low, [matrix], single)]

    return fused, apart


def draw(*shapes: tuple[int, ...]) -> Tensors:
    """Return random tensors."""
    return [torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes]


def microseconds(given: Tensors, compute: Compute) -> float:
    """Return what one forward and backward pass takes. Some write over their first inputs, as over a base's output."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    slopes = [torch.randn_like(out) for out in compute(*leaves)]

    def run() -> None:
        torch.autograd.grad(compute(*leaves), leaves, slopes)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def main(*words: str) -> None:
    """Print a table for each shape."""
    for name in [word for word in words if word != "tiles"] or ("qwen3-0.6b", "qwen3-8b"):
        shape = SHAPES[name]
        print(f"{name}: {shape.sequences} x {shape.length} tokens, rank {RANK}, {torch.cuda.get_device_name()}")
        if "tiles" in words:
            sweep(shape)
            continue
        print(f"{'':24s}  one kernel  several  ms saved by {shape.layers} layers")
        for kind, given, fused, apart in cases(shape):
            ours, theirs = microseconds(given, fused), microseconds(given, apart)
            print(f"{kind:24s}  {ours:10.1f}  {theirs:7.1f}  {1e-3 * shape.layers * (theirs - ours):8.2f}", flush=True)


def sweep(shape: Shape) -> None:
    """Print the times with each of ``TILES``, beside that with a module's own."""
    timed = {kind: (given, fused) for kind, given, fused, _ in cases(shape)}
    for kind, module, names, choices in TILES:
        own = [getattr(module, name) for name in names]
        print(f"{kind}: {', '.join(names)}")
        for values in (own, *choices):
            for name, value in zip(names, values, strict=True):
                setattr(module, name, value)
            try:
                took = f"{microseconds(*timed[kind]):7.1f}"
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                took = f"{type(error).__name__}: {error}"[:60]
            print(f"  {took}  {', '.join(map(str, values))}", flush=True)
        for name, value in zip(names, own, strict=True):
            setattr(module, name, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
