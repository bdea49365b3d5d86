# SPDX-License-Identifier: Apache-2.0
"""Compare attention over packed tokens with the same over pages, in steps and chunks; see `bitwise_ops`."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from megarl.bitwise.kernels.attention import Pages, attend, packed_pages
from megarl.model.layers.bitwise.attention_gradient import attend_backward
from tests.gpu.bitwise_ops import compare, draw, milliseconds, say


def attention() -> None:
    """Compare decoding, chunked prefill and a cached prefix with packed sequences."""
    for groups, queries, width, size in ((8, 2, 128, 64), (8, 4, 128, 128), (3, 3, 64, 64), (4, 7, 128, 64)):
        try:
            _one(groups, queries, width, size)
        except Exception as error:
            say(f"attention {groups}x{queries}x{width}: FAILED {str(error)[:300]}")


def _one(groups: int, queries: int, width: int, size: int) -> None:
    name = f"attention {groups}x{queries}x{width}, pages of {size}:"
    lengths = torch.randint(1, 700, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    query, key, value = _packed(sum(lengths), groups, queries, width)
    packed = packed_pages(key, value, bounds, max(lengths))
    out, sums = attend(query, packed, bounds, width**-0.5)
    pages = _cache(key, value, lengths, size)
    last = (bounds[1:] - 1).long()
    starts = torch.arange(41, dtype=torch.int32, device="cuda")
    decoded, _ = attend(query[last], pages, starts, width**-0.5)
    say(name, "decode", compare(decoded, out[last]))
    for count in (1, 5):
        few = pages._replace(table=pages.table[:count], lengths=pages.lengths[:count])
        again, _ = attend(query[last[:count]], few, starts[: count + 1], width**-0.5)
        say(name, f"decode of {count}", compare(again, out[last[:count]]))
    tails = [max(1, length // 3) for length in lengths]
    rows = torch.cat([torch.arange(int(end) - tail, int(end)) for end, tail in zip(bounds[1:], tails, strict=True)])
    starts = torch.tensor([0, *tails], device="cuda").cumsum(0).int()
    chunk, _ = attend(query[rows.cuda()], pages, starts, width**-0.5)
    say(name, "last third of each", compare(chunk, out[rows.cuda()]))
    again, more = attend(query, packed, bounds, width**-0.5)
    say(name, "twice", compare(again, out), compare(more, sums))
    slope = draw(*out.shape)
    given = (slope, query, key, value, out, sums, bounds, max(lengths), width**-0.5)
    first, second = attend_backward(*given), attend_backward(*given)
    say(name, "gradients twice", *(compare(a, b) for a, b in zip(first, second, strict=True)))
    _errors(name, query, key, value, bounds, slope, out, first)


def _packed(tokens: int, groups: int, queries: int, width: int) -> tuple[torch.Tensor, ...]:
    """Return queries, and keys and values whose tokens lie as in a fused projection."""
    fused = draw(tokens, groups, queries + 2, width)
    return fused[:, :, :queries].reshape(tokens, -1, width), fused[:, :, queries].contiguous(), fused[:, :, queries + 1]


def _cache(key: torch.Tensor, value: torch.Tensor, lengths: list[int], size: int) -> Pages:
    """Copy keys and values into pages in random order, as vLLM's cache holds them; the rest is not a number."""
    groups, width = key.shape[1:]
    needed = [-(-length // size) for length in lengths]
    numbers = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(0))
    memory = torch.full((len(numbers), size, groups, 2 * width), float("nan"), dtype=key.dtype, device="cuda")
    table = torch.zeros(len(lengths), max(needed) + 5, dtype=torch.int32)
    start = used = 0
    for sequence, length in enumerate(lengths):
        for page in range(needed[sequence]):
            number = int(numbers[used])
            end = min(length, (page + 1) * size)
            rows = slice(start + page * size, start + end)
            memory[number, : end - page * size] = torch.cat([key[rows], value[rows]], -1)
            table[sequence, page] = number
            used += 1
        start += length
    keys, values = memory.split(width, -1)
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Pages(keys, values, keys.stride()[:3], values.stride()[:3], groups, table.cuda(), counts, size)


def _errors(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, slope: torch.Tensor,
    out: torch.Tensor, gradients: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Print the errors against float64, ours and those of torch's variable-length attention."""
    leaves = [t.detach().double().requires_grad_() for t in (query, key, value)]
    ends = bounds.tolist()
    parts = [
        F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1)[None] for t in leaves), is_causal=True, enable_gqa=True)
        for a, b in pairwise(ends)
    ]
    exact = torch.cat([part[0].transpose(0, 1) for part in parts])
    exact.backward(slope.double())
    theirs = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    fast = _varlen(*theirs, bounds)
    fast.backward(slope)
    ours = [_error(o, e) for o, e in zip((out, *gradients), (exact.detach(), *(t.grad for t in leaves)), strict=True)]
    known = [_error(o, e) for o, e in zip((fast.detach(), *(t.grad for t in theirs)),
                                          (exact.detach(), *(t.grad for t in leaves)), strict=True)]  # fmt: skip
    say(name, "errors of out, dq, dk, dv:", [f"{e:.2e}" for e in ours], "fast", [f"{e:.2e}" for e in known])


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Attend as the fast path does."""
    from megarl.model.layers.attention.core import PackedSequences, attend_runs

    lengths = tuple(bounds.diff().tolist())
    return attend_runs(query, key, value, PackedSequences.from_lengths(lengths, query.device), None)


def attention_times() -> None:
    """Time training's forward and backward pass, and a decoding step."""
    for groups, queries, count, length in ((8, 2, 32, 1024), (8, 4, 4, 4096)):
        bounds = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
        query, key, value = _packed(count * length, groups, queries, 128)
        slope = draw(*query.shape)
        pages = packed_pages(key, value, bounds, length)
        out, sums = attend(query, pages, bounds, 128**-0.5)
        leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
        kept = _varlen(*leaves, bounds)
        given = slope, query, key, value, out, sums, bounds, length, 128**-0.5
        times = (
            milliseconds(attend, query, pages, bounds, 128**-0.5),
            milliseconds(attend_backward, *given),
            milliseconds(_varlen, *leaves, bounds),
            milliseconds(kept.backward, slope, retain_graph=True),
        )
        what = "forward, backward, fast forward, fast backward"
        say(f"time attention {groups}x{queries}x128, {count} x {length}, ms of {what}:")
        say(" ", ", ".join(f"{t:.3f}" for t in times))
        pages = _cache(key, value, [length] * count, 64)
        starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        once = milliseconds(attend, query[:count], pages, starts, 128**-0.5)
        say(f"time of a decoding step of {count} at {length}, ms: {once:.4f}")
