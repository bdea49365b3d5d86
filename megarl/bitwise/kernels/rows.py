# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding and SwiGLU: every row by itself, in float32, rounded once.

Shape letters: T tokens, H heads, D features of a head, I features of the gate.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megarl.bitwise.kernels.launch import UNFUSED, aligned
from megarl.triton_support import ceil_div, power_of_two

# Elements of one program. A row's sum depends on the shape of the tile, so the tile follows from the width alone.
NORM_ELEMENTS, FEATURES_OF_A_WARP = 2048, 512
ROTATED_HEADS = 32
GATE_ROWS, GATE_COLUMNS = 16, 256


class Heads(NamedTuple):
    """Places of heads in a row of a fused projection: runs of ``run`` heads, one every ``period`` elements.

    ``number`` heads of ``width`` features in all; the first begins at element ``start``.
    """

    number: int
    width: int
    run: int
    period: int
    start: int

    @classmethod
    def of(cls, number: int, width: int, start: int = 0) -> "Heads":
        """Return heads that lie side by side."""
        return cls(number, width, number, 0, start)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, heads: Heads | None = None) -> torch.Tensor:
    """Root mean square norm (Zhang and Sennrich, arXiv:1910.07467) of every row, or of every head of a row.

    Args:
        hidden: ``[T, W]``.
        weight: ``[D]``.
        eps: added to the mean square.
        heads: the heads to normalise; default: the whole row, ``D = W``.

    Returns:
        ``[T, H, D]`` with ``heads``, else ``[T, W]``.
    """
    hidden = aligned(hidden)
    tokens, width = hidden.shape[0], weight.shape[0]
    out = hidden.new_empty((tokens, width) if heads is None else (tokens, heads.number, width))
    heads = heads or Heads.of(1, width)
    block = power_of_two(width)
    rows = max(1, NORM_ELEMENTS // block)
    if tokens:
        _norm[(ceil_div(tokens * heads.number, rows),)](
            hidden,
            weight,
            out,
            tokens,
            hidden.stride(0),
            heads.period,
            heads.start,
            eps,
            COUNT=heads.number,
            RUN=heads.run,
            WIDTH=width,
            BLOCK=block,
            ROWS=rows,
            num_warps=min(16, max(1, rows * block // FEATURES_OF_A_WARP)),
            **UNFUSED,
        )
    return out


def rotate(states: torch.Tensor, angles: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864); a feature of the first half pairs with the second half.

    Args:
        states: ``[T, W]``, or ``[T, H, D]``, whose heads lie side by side.
        angles: ``[T, D / 2]`` or wider, float32 radians.
        heads: the heads to rotate.

    Returns:
        ``[T, H, D]``.
    """
    states, angles = aligned(states), aligned(angles)
    tokens, half = states.shape[0], heads.width // 2
    out = states.new_empty(tokens, heads.number, heads.width)
    if tokens:
        _rotate[(tokens, ceil_div(heads.number, ROTATED_HEADS))](
            states,
            angles,
            out,
            states.stride(0),
            angles.stride(0),
            heads.period,
            heads.start,
            COUNT=heads.number,
            RUN=heads.run,
            HALF=half,
            BLOCK=power_of_two(half),
            HEADS=min(ROTATED_HEADS, power_of_two(heads.number)),
            num_warps=4,
            **UNFUSED,
        )
    return out


def swiglu(fused: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` (Shazeer, arXiv:2002.05202), ``[T, 2 I] -> [T, I]``: the gate's features come first."""
    fused = aligned(fused)
    tokens, width = fused.shape[0], fused.shape[1] // 2
    out = fused.new_empty(tokens, width)
    if tokens:
        _swiglu[(ceil_div(tokens, GATE_ROWS), ceil_div(width, GATE_COLUMNS))](
            fused,
            out,
            tokens,
            fused.stride(0),
            WIDTH=width,
            ROWS=GATE_ROWS,
            COLUMNS=GATE_COLUMNS,
            num_warps=4,
            **UNFUSED,
        )
    return out


@triton.jit
def _head(base, row, stride, period, start, COUNT: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """Return the address of a row's first feature; rows are numbered token by token, and head by head within."""
    head = row % COUNT
    return base + (row // COUNT).to(tl.int64) * stride + start + head // RUN * period + head % RUN * WIDTH


@triton.jit(do_not_specialize=["tokens"])
def _norm(
    hidden, weight, out, tokens, stride, period, start, eps, COUNT: tl.constexpr, RUN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < tokens * COUNT)[:, None] & (column < WIDTH)[None, :]
    place = _head(hidden, row, stride, period, start, COUNT, RUN, WIDTH)[:, None] + column[None, :]
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    normed = values * root[:, None] * scale[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    states, angles, out, stride, angles_stride, period, start, COUNT: tl.constexpr, RUN: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < COUNT)[:, None] & (column < HALF)[None, :]
    angle = tl.load(angles + token * angles_stride + column, mask=column < HALF, other=0.0)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    place = _head(states, token * COUNT + head, stride, period, start, COUNT, RUN, 2 * HALF)[:, None] + column[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * COUNT + head)[:, None] * 2 * HALF + column[None, :]
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu(fused, out, tokens, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    place = fused + row[:, None] * stride + column[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    active = gate * tl.sigmoid(gate) * up
    tl.store(out + row[:, None] * WIDTH + column[None, :], active.to(out.dtype.element_ty), mask=inside)
