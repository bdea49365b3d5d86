# SPDX-License-Identifier: Apache-2.0
"""Time the kernels that add adapters' products, and the same with products of their own.

`python3 -m tests.gpu.update_times [SHAPE ...]`: named shapes of `megarl bench train` (qwen3-0.6b, qwen3-8b). Prints
microseconds of one layer, forward and backward in a CUDA graph, without the linears' bases, and milliseconds of all
layers that the kernels save.
"""

import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from megarl.bench.shapes import SHAPES, Shape
from megarl.lora.layers.products import Layout, add_wide, project_through
from megarl.model.layers.kernels import adapted_heads, adapted_swiglu, heads, residual, swiglu
from megarl.model.layers.updates import Part, Update
from megarl.model.weights.fusion import HeadLayout

RANK, SCALE, EPS, DTYPE, DEVICE = 16, 2.0, 1e-6, torch.bfloat16, "cuda"
# Calls in a graph, so that a launch of one does not count; replays that are timed.
CALLS, REPLAYS = 10, 7
Tensors = list[torch.Tensor]
Compute = Callable[..., Tensors]


def cases(shape: Shape) -> Iterator[tuple[str, Tensors, Compute, Compute]]:
    """Yield name, inputs, and what computes them by one kernel and by several."""
    tokens, hidden, inner = shape.sequences * shape.length, shape.hidden, shape.inner
    layout = HeadLayout(shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    rows = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    given = draw((tokens, 1, sum(rows)), (tokens, 1, 3 * RANK), *((count, RANK) for count in rows))
    yield "heads", given, *heads_of(tokens, layout)
    given = draw((tokens, 2 * inner), (tokens, 2 * RANK), (inner, RANK), (inner, RANK), (RANK, inner))
    yield "SwiGLU", given, *swiglus(layout)
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


def main(*names: str) -> None:
    """Print a table for each shape."""
    for name in names or ("qwen3-0.6b", "qwen3-8b"):
        shape = SHAPES[name]
        print(f"{name}: {shape.sequences} x {shape.length} tokens, rank {RANK}, {torch.cuda.get_device_name()}")
        print(f"{'':24s}  one kernel  several  ms saved by {shape.layers} layers")
        for kind, given, fused, apart in cases(shape):
            ours, theirs = microseconds(given, fused), microseconds(given, apart)
            print(f"{kind:24s}  {ours:10.1f}  {theirs:7.1f}  {1e-3 * shape.layers * (theirs - ours):8.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
