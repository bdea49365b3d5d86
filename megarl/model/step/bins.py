# SPDX-License-Identifier: Apache-2.0
"""Plan micro-batches: bins of bounded size with balanced work. Pure arithmetic in n log n, the same on all ranks."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

# Number of cheapest bins to try before an item counts as not fitting.
TRIED = 64


def plan_bins(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, *, groups: int = 1, at_least: int = 1
) -> list[list[int]]:
    """Spread items over at most as many bins as best-fit-decreasing needs, with the costs as even as possible.

    Two methods are tried. Placing the costliest items first, each into the bin that costs least (Graham's LPT rule),
    balances best, but may not fit. Where it does not, bins are nearly full and so nearly alike in length, and
    best-fit-decreasing fills them.

    Args:
        lengths: length of each item; none exceeds ``capacity``.
        costs: cost of each item.
        capacity: largest sum of lengths in a bin.
        groups: the number of bins is a multiple of this.
        at_least: least number of bins per group, if there are enough items.

    Returns:
        Item indices per bin. Bins are empty where there are fewer items than bins.
    """
    wanted = min(groups * at_least, max(len(lengths), 1))
    full = best_fit(lengths, capacity)
    fewest = _rounded(max(-(-sum(lengths) // capacity), wanted), groups)
    enough = _rounded(max(len(full), wanted), groups)
    for count in sorted({fewest, enough}):
        if (bins := _cheapest_first(lengths, costs, capacity, count)) is not None:
            return bins
    return full + [[] for _ in range(enough - len(full))]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best-fit-decreasing: the longest items first, each into the fullest bin that still has room.

    Needs at most 11/9 of the fewest bins, plus one (Johnson et al., SIAM J. Computing 3, 1974).
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted pairs: free length, bin
    for item in _descending(lengths):
        at = bisect_left(rooms, (lengths[item], -1))
        if at == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(at)
        bins[chosen].append(item)
        insort(rooms, (room - lengths[item], chosen))
    return bins


def deal(bins: Sequence[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins, ordered so that bins that run at the same time cost about the same.

    Ranks that meet in every micro-batch (expert parallelism) wait for the costliest bin of a row; other ranks wait for
    the costliest sum. Within a row, the costliest bin goes to the rank with the smallest sum.

    Args:
        bins: bins of item indices; their number is a multiple of ``ranks``.
        costs: cost of each item.
        ranks: number of data-parallel ranks.
    """
    totals = [sum(costs[item] for item in items) for items in bins]
    order = _descending(totals)
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for start in range(0, len(order), ranks):
        lightest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for chosen, rank in zip(order[start : start + ranks], lightest, strict=True):
            dealt[rank].append(bins[chosen])
            sums[rank] += totals[chosen]
    return dealt


def _cheapest_first(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int
) -> list[list[int]] | None:
    """Place the costliest items first, each into the cheapest bin with room; None if an item fits into no tried bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    heap = [(0.0, index) for index in range(count)]
    for item in _descending(costs):
        full: list[tuple[float, int]] = []
        while heap and rooms[heap[0][1]] < lengths[item] and len(full) < TRIED:
            full.append(heapq.heappop(heap))
        if not heap or rooms[heap[0][1]] < lengths[item]:
            return None
        cost, chosen = heap[0]
        bins[chosen].append(item)
        rooms[chosen] -= lengths[item]
        heapq.heapreplace(heap, (cost + costs[item], chosen))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _descending(values: Sequence[float]) -> list[int]:
    """Indices sorted by falling value; ties keep their order, so that every rank sorts alike."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
