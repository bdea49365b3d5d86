"""Times of the ways to compute a linear with LoRA, on one GPU: `python3 -m tests.gpu.products [TOKENS]`

For each linear of two models, milliseconds of the base's product alone and with the update done as named:

    after     out = x W';  out += low B'          what megarl/lora/products.py does
    before    out = low B';  out += x W'          the base's product reads what it adds to while it computes
    wider     [x low] [W B]'                      what megarl/lora/room.py does
    kernel    out = x W';  out += low B' by Triton

and of the two products that read the gradient of the output, and of a kernel's reading it once (the least it can take).
"""

import sys

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

RANK = 16
# (name, outputs, inputs, parts)
LINEARS = {
    "qwen3-0.6b": [("qkv", 4096, 1024, 3), ("proj", 1024, 2048, 1), ("fc1", 6144, 1024, 2), ("fc2", 1024, 3072, 1)],
    "qwen3-8b": [("qkv", 6144, 4096, 3), ("proj", 4096, 4096, 1), ("fc1", 24576, 4096, 2), ("fc2", 4096, 12288, 1)],
}
COLUMNS = ("linear", "base", "after", "before", "wider", "kernel", "g B", "g' low", "both", "read g")


@triton.jit
def _add(out, low, wide, tokens, outputs, R: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    rank = tl.arange(0, RANK)
    left = tl.load(
        low + row[:, None] * R + rank[None, :], mask=(row < tokens)[:, None] & (rank < R)[None, :], other=0.0
    )
    right = tl.load(
        wide + column[None, :] * R + rank[:, None], mask=(column < outputs)[None, :] & (rank < R)[:, None], other=0.0
    )
    place = out + row[:, None] * outputs + column[None, :]
    inside = (row < tokens)[:, None] & (column < outputs)[None, :]
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.dot(left, right)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def add_by_kernel(out: torch.Tensor, low: torch.Tensor, wide: torch.Tensor, rows: int = 64, cols: int = 256) -> None:
    """``out += low @ wide.T`` in place."""
    tokens, outputs = out.shape
    grid = (triton.cdiv(tokens, rows), triton.cdiv(outputs, cols))
    rank = max(16, triton.next_power_of_2(low.shape[1]))
    _add[grid](out, low, wide, tokens, outputs, R=low.shape[1], RANK=rank, ROWS=rows, COLS=cols, num_warps=8)


def measure(tokens: int, outputs: int, inputs: int, rank: int) -> list[float]:
    """Milliseconds, in the order of ``COLUMNS``."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight, low, wide = draw(tokens, inputs), draw(outputs, inputs), draw(tokens, rank), draw(outputs, rank)
    together, both = torch.cat([x, low], dim=1), torch.cat([weight, wide], dim=1)
    out, gradient = draw(tokens, outputs), draw(tokens, outputs)

    def after() -> None:
        torch.mm(x, weight.t(), out=out)
        out.addmm_(low, wide.t())

    def before() -> None:
        torch.mm(low, wide.t(), out=out)
        out.addmm_(x, weight.t())

    def kernel() -> None:
        torch.mm(x, weight.t(), out=out)
        add_by_kernel(out, low, wide)

    def back() -> None:
        torch.mm(gradient, wide)
        torch.mm(gradient.t(), low)

    exact = out.float() + low.float() @ wide.float().t()
    add_by_kernel(out, low, wide)
    assert ((out.float() - exact).norm() / exact.norm()) < 4e-3
    ways = [
        lambda: torch.mm(x, weight.t(), out=out), after, before, lambda: torch.mm(together, both.t(), out=out), kernel,
        lambda: torch.mm(gradient, wide), lambda: torch.mm(gradient.t(), low), back, lambda: gradient.amax(),
    ]  # fmt: skip
    return [do_bench(way, return_mode="median") for way in ways]


def main(tokens: int = 16384) -> None:
    """Print a table per model."""
    for model, linears in LINEARS.items():
        count = tokens if model == "qwen3-0.6b" else tokens // 2
        print(f"\n{model}, {count} tokens, r={RANK}")
        print("".join(name.rjust(9) for name in COLUMNS))
        for name, outputs, inputs, parts in linears:
            times = measure(count, outputs, inputs, parts * RANK)
            print(name.rjust(9) + "".join(f"{time:9.3f}" for time in times))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
