# SPDX-License-Identifier: Apache-2.0
"""Logprobs from float32 logits: every row by itself, in blocks of one size.

Shape letters: R rows, V logits of each.
"""

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.launch import UNFUSED
from megarl.triton_support import ceil_div

BLOCK = 4096
# Finite, so that a product with the distance to it is never NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


def divide_(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Divide every row by its temperature in place, rounded as IEEE 754 says; 0 and 1 leave a row unchanged.

    Args:
        logits: ``[R, V]`` float32, rows contiguous.
        temperatures: ``[R]`` float32.

    Returns:
        ``logits``.
    """
    rows, columns = logits.shape
    if rows:
        _divide[(rows, ceil_div(columns, BLOCK))](
            logits, temperatures, columns, logits.stride(0), BLOCK=BLOCK, **UNFUSED
        )
    return logits


def row_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return ``[3, R]`` float32: the largest logit m of each row, and the sums of e^(l - m) and of e^(l - m) (l - m).

    Args:
        logits: ``[R, V]`` float32, rows contiguous.
    """
    rows, columns = logits.shape
    sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _sums[(rows,)](logits, sums, rows, columns, logits.stride(0), BLOCK=BLOCK, num_warps=8, **UNFUSED)
    return sums


@triton.jit(do_not_specialize=["stride"])
def _divide(logits, temperatures, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature != 0.0 and temperature != 1.0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + row * stride + column
        value = tl.load(place, mask=column < columns, other=0.0)
        tl.store(place, tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * temperature), mask=column < columns)


@triton.jit(do_not_specialize=["rows", "stride"])
def _sums(logits, sums, rows, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    largest = LOWEST
    total = 0.0
    moment = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(start_of_row + column, mask=inside, other=LOWEST)
        higher = tl.maximum(largest, tl.max(value, 0))
        # Rescale the sums so far, which are relative to the old maximum.
        fall = largest - higher
        scale = tl.exp(fall)
        moment = (moment + total * fall) * scale
        total = total * scale
        below = tl.where(inside, value - higher, 0.0)
        power = tl.where(inside, tl.exp(below), 0.0)
        total += tl.sum(power, 0)
        moment += tl.sum(power * below, 0)
        largest = higher
    tl.store(sums + row, largest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, moment)
