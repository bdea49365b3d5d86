# SPDX-License-Identifier: Apache-2.0
"""Time tensor-parallel linears with adapters by the parts that their tokens are divided into.

`python3 -m tests.gpu.overlap_times [SHAPE] [RANKS] [TOKENS]`: a named shape of `megarl bench train` (qwen3-8b), ranks
(4) with a GPU each, tokens of a micro-batch (8192). Prints a table of milliseconds, forward and backward. One part is
not overlapped. `megarl.lora.layers.overlapped` has the number of parts that is used.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from megarl.bench.shapes import SHAPES
from megarl.verify.launch import run_ranks

PARTS, ROUNDS, RANK = (1, 2, 3, 4, 8), 20, 16
Times = dict[tuple[str, int], tuple[float, float]]


def measure(shape: str, ranks: int, tokens: int) -> Times:
    """Return the milliseconds of forward and backward pass of each linear, by its name and the number of parts."""
    from megarl.config import ParallelConfig
    from megarl.lora.layers import overlapped
    from megarl.lora.layers.products import Layout
    from megarl.model.weights.fusion import HeadLayout
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    group = init_groups(ParallelConfig(tensor=ranks), pick_device("auto"), seed=0).tensor
    one = SHAPES[shape]
    heads = (one.heads + 2 * one.kv_heads) * one.head_dim
    sizes = {
        "qkv": (True, one.hidden, heads // ranks),
        "o": (False, one.heads * one.head_dim // ranks, one.hidden),
        "gate, up": (True, one.hidden, 2 * one.inner // ranks),
        "down": (False, one.inner // ranks, one.hidden),
    }
    layout = Layout((0,), (RANK,), (2.0,), "single", HeadLayout(1, 1, 1))

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    found: Times = {}
    overlapped.LEAST_BYTES = 1
    for parts in PARTS:
        overlapped.MOST_PARTS = parts
        for name, (column, inputs, outputs) in sizes.items():
            linear = overlapped.column_linear if column else overlapped.row_linear
            hidden = drawn(tokens // ranks if column else tokens, 1, inputs).requires_grad_()
            weight, a, b = drawn(outputs, inputs), drawn(RANK, inputs), drawn(outputs, RANK)
            a.requires_grad_(), b.requires_grad_()
            out = linear(hidden, weight, a, [b], layout, group)
            slope = torch.randn_like(out)

            def forward(linear: Callable = linear, given: tuple = (hidden, weight, a, [b], layout, group)) -> None:
                linear(*given)

            def backward(out: torch.Tensor = out, slope: torch.Tensor = slope) -> None:
                out.backward(slope, retain_graph=True)

            found[name, parts] = timed(forward), timed(backward)
    return found


def timed(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call. Its ranks start together, and its launches are far ahead."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        torch.cuda._sleep(2_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main(shape: str = "qwen3-8b", ranks: str = "4", tokens: str = "8192") -> None:
    """Measure and print."""
    began = time.monotonic()
    found = run_ranks(measure, int(ranks), shape, int(ranks), int(tokens))[0]
    print(f"{shape}, tensor {ranks}, {tokens} tokens; forward + backward, milliseconds, by parts")
    print(f"{'':10}" + "".join(f"{parts:>16}" for parts in PARTS))
    for name in dict.fromkeys(name for name, _ in found):
        cells = ("{:.3f} + {:.3f}".format(*found[name, parts]) for parts in PARTS)
        print(f"{name:10}" + "".join(f"{cell:>16}" for cell in cells))
    sums = (sum(map(sum, (found[key] for key in found if key[1] == parts))) for parts in PARTS)
    print(f"{'all':10}" + "".join(f"{total:>16.3f}" for total in sums))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
