# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over a chunk of logits: one pass for the sums of the forward, one for the gradient.

The same computation as torch operations on float32 copies takes about forty bytes of memory traffic per logit in either
direction, which is most of the time of a small model's output layer on a GPU. Here the forward reads each logit once,
and the backward reads it once and overwrites it with its gradient.

Shape letters: C tokens of the chunk, V logits of each.
"""

import torch
import triton
import triton.language as tl

from megarl.triton_support import ceil_div
from megarl.triton_support.fast_math import exp

SUMS_BLOCK, SUMS_WARPS, SLOPE_BLOCK = 2048, 4, 4096
# Finite, so that a product with the distance to it is never NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


def softmax_sums(logits_CV: torch.Tensor, label_C: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``[4, C]`` float32: largest logit m, the label's logit (0 if elsewhere), sum of e^(l-m), of e^(l-m) (l-m).

    Args:
        logits_CV: logits before the division by the temperature; 16- or 32-bit floats, rows contiguous.
        label_C: int64, the label's index in a row, or -1 if it is in another shard.
        temperature: divisor of the logits.
    """
    tokens, columns = logits_CV.shape
    sums = torch.empty(4, tokens, dtype=torch.float32, device=logits_CV.device)
    _sums[(tokens,)](
        logits_CV, label_C, sums, tokens, columns, logits_CV.stride(0), 1.0 / temperature, BLOCK=SUMS_BLOCK,
        num_warps=SUMS_WARPS,
    )  # fmt: skip
    return sums


def softmax_slope_(
    logits_CV: torch.Tensor,
    label_C: torch.Tensor,
    logsumexp_C: torch.Tensor,
    entropy_C: torch.Tensor,
    temperature: float,
    by_logprob_C: torch.Tensor | None,
    by_entropy_C: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrite the logits with the gradient of the divided logits; see ``megarl.loss.logprobs`` for the formula.

    Args:
        logits_CV, label_C, temperature: as for ``softmax_sums``.
        logsumexp_C, entropy_C: float32, of the divided logits over the whole vocabulary.
        by_logprob_C, by_entropy_C: float32 incoming gradients; None means zero.

    Returns:
        ``logits_CV``.
    """
    tokens, columns = logits_CV.shape
    grid = (tokens, ceil_div(columns, SLOPE_BLOCK))
    _slope[grid](
        logits_CV,
        label_C,
        logsumexp_C,
        entropy_C,
        logsumexp_C if by_logprob_C is None else by_logprob_C,
        logsumexp_C if by_entropy_C is None else by_entropy_C,
        columns,
        logits_CV.stride(0),
        1.0 / temperature,
        BY_LOGPROB=by_logprob_C is not None,
        BY_ENTROPY=by_entropy_C is not None,
        BLOCK=SLOPE_BLOCK,
        num_warps=8,
    )
    return logits_CV


@triton.jit
def _sums(logits, labels, sums, tokens, columns, stride, factor, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    # Sums of the columns at one place of all blocks, so that threads need not meet for them in each block.
    largest, total, moment = LOWEST, tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        value = tl.load(row + start + tl.arange(0, BLOCK)).to(tl.float32) * factor
        largest, total, moment = _with_block(value, None, largest, total, moment)
    if whole < columns:
        column = whole + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32) * factor
        largest, total, moment = _with_block(value, inside, largest, total, moment)
    label = tl.load(labels + token)
    value_of_label = tl.load(row + tl.maximum(label, 0)).to(tl.float32) * factor
    tl.store(sums + token, largest)
    tl.store(sums + tokens + token, tl.where(label >= 0, value_of_label, 0.0))
    tl.store(sums + 2 * tokens + token, tl.sum(total, 0))
    tl.store(sums + 3 * tokens + token, tl.sum(moment, 0))


@triton.jit
def _with_block(value, inside, largest, total, moment):
    """Return the largest value and the sums, which are relative to it, with those of a block; None: all is inside."""
    highest = tl.max(value if inside is None else tl.where(inside, value, LOWEST), 0)
    # It seldom rises after the first block.
    if highest > largest:
        fall = largest - highest
        scale = exp(fall)
        moment = (moment + total * fall) * scale
        total = total * scale
        largest = highest
    below = value - largest
    power = exp(below)
    if inside is not None:
        below, power = tl.where(inside, below, 0.0), tl.where(inside, power, 0.0)
    return largest, total + power, moment + power * below


@triton.jit
def _slope(
    logits, labels, logsumexp, entropy, by_logprob, by_entropy, columns, stride, factor,
    BY_LOGPROB: tl.constexpr, BY_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = logits + token * stride + column
    logprob = tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor - tl.load(logsumexp + token)
    probability = exp(logprob)
    slope = tl.zeros_like(probability)
    if BY_ENTROPY:
        slope -= tl.load(by_entropy + token) * probability * (logprob + tl.load(entropy + token))
    if BY_LOGPROB:
        gradient = tl.load(by_logprob + token)
        slope += gradient * (tl.where(column == tl.load(labels + token), 1.0, 0.0) - probability)
    tl.store(place, slope.to(logits.dtype.element_ty), mask=inside)
