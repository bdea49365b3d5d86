# SPDX-License-Identifier: Apache-2.0
"""Time tensor-parallel linears with adapters, and what the exchange of tokens costs them.

`python3 -m tests.gpu.overlap_times [SHAPE] [RANKS] [TOKENS]`: a named shape of `megarl bench train` (qwen3-8b), ranks
(4) with a GPU each, tokens of a micro-batch (8192). Prints a table of milliseconds, forward and backward: products
alone, with NCCL's collectives before or after them, and with copies between the GPUs beside them.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megarl.bench.shapes import SHAPES
from megarl.parallel.peers import Peers
from megarl.parallel.token_exchange import Fill, Use, Whole
from megarl.verify.launch import run_ranks

ROUNDS, RANK = 20, 16
# What each linear took, forward and backward, by its name and that of the exchange.
Times = dict[tuple[str, str], tuple[float, float]]


class Nothing(Whole):
    """Exchanges nothing: what the products take alone. The values are wrong."""

    def gather(self, wide: torch.Tensor, narrow: torch.Tensor, use: Use) -> torch.Tensor:
        every, low = (local.repeat(self._group.size(), 1) for local in (wide, narrow))
        use(slice(0, len(every)), every, low)
        return low

    def scatter(self, fill: Fill, like: torch.Tensor, tokens: int, features: int) -> torch.Tensor:
        every = like.new_empty(self._group.size() * tokens, features)
        fill(slice(0, len(every)), every)
        return every[:tokens]


EXCHANGES = {"products": Nothing, "collectives": Whole, "peers": Peers}


def measure(shape: str, ranks: int, tokens: int) -> Times:
    """Return the times of each linear with each exchange, in milliseconds."""
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
    for exchange, kind in EXCHANGES.items():
        made = kind(group)
        overlapped.exchange_of = lambda group, like, work, made=made: made
        for name, (column, inputs, outputs) in sizes.items():
            linear = overlapped.column_linear if column else overlapped.row_linear
            hidden = drawn(tokens // ranks if column else tokens, 1, inputs).requires_grad_()
            weight, a, b = drawn(outputs, inputs), drawn(RANK, inputs), drawn(outputs, RANK)
            a.requires_grad_(), b.requires_grad_()
            given = (hidden, weight, a, [b], layout, group)
            out = linear(*given)
            slope = torch.randn_like(out)

            def forward(linear: Callable = linear, given: tuple = given) -> None:
                linear(*given)

            def backward(out: torch.Tensor = out, slope: torch.Tensor = slope) -> None:
                out.backward(slope, retain_graph=True)

            found[name, exchange] = timed(forward), timed(backward)
    return found


def timed(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call. Its ranks start together, and its launches are far ahead."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
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
    print(f"{shape}, tensor {ranks}, {tokens} tokens; forward + backward, milliseconds")
    print(f"{'':10}" + "".join(f"{exchange:>18}" for exchange in EXCHANGES))
    for name in dict.fromkeys(name for name, _ in found):
        cells = ("{:.3f} + {:.3f}".format(*found[name, exchange]) for exchange in EXCHANGES)
        print(f"{name:10}" + "".join(f"{cell:>18}" for cell in cells))
    sums = (sum(map(sum, (found[key] for key in found if key[1] == exchange))) for exchange in EXCHANGES)
    print(f"{'all':10}" + "".join(f"{total:>18.3f}" for total in sums))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
