# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a pack each context-parallel (CP) rank holds. Pure index arithmetic, the same on every rank.

Each sequence of a pack is padded to a multiple of 2 * CP tokens and cut into 2 * CP equal chunks; rank i holds chunk i
and then chunk 2 * CP - 1 - i. A token of chunk c attends to c whole chunks and the part of its own before it, so every
rank attends to 2 * CP + 1 chunks' worth of keys, less the same corner: the load is equal on all ranks, whatever the
lengths. It is the partition of Transformer Engine's thd format (``thd_get_partitioned_indices``), also where a pack has
several sequences: sequence after sequence, both chunks of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Consecutive tokens of one sequence on a rank, and the keys they attend to.

    Attributes:
        start: where the sequence starts in the whole pack.
        before: tokens of the sequence before the run.
        length: tokens of the run.
    """

    start: int
    before: int
    length: int

    @property
    def keys(self) -> int:
        """Keys that the run's last token attends to: the sequence up to and with the run."""
        return self.before + self.length


def padded_length(length: int, context: int) -> int:
    """Tokens of a sequence with its padding: the next multiple of 2 * CP, or ``length`` itself without CP."""
    chunks = _chunks(context)
    return -(-length // chunks) * chunks


def rank_runs(lengths: Sequence[int], context: int, rank: int) -> list[Run]:
    """What a rank holds, in its order: two runs of every sequence, or the whole sequence without CP.

    Args:
        lengths: padded lengths of the pack's sequences.
        context: CP size.
        rank: CP rank.
    """
    chunks = _chunks(context)
    held = (0,) if context == 1 else (rank, chunks - 1 - rank)
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        Run(start, chunk * (length // chunks), length // chunks)
        for start, length in zip(starts, lengths, strict=False)
        for chunk in held
    ]


def rank_tokens(lengths: Sequence[int], context: int, rank: int) -> np.ndarray:
    """``[sum(lengths) / CP]`` int64: indices into the whole pack of a rank's tokens, in its order."""
    runs = rank_runs(lengths, context, rank)
    return np.concatenate([np.arange(run.start + run.before, run.start + run.keys) for run in runs])


def key_rows(lengths: Sequence[int], context: int, rank: int) -> np.ndarray:
    """``[sum of the runs' keys]`` int64: where the keys of a rank's runs, run after run, lie in the gathered pack.

    The gathered pack is all ranks' tokens, rank after rank. No row occurs more than twice: once in each run of its
    sequence.
    """
    gathered = np.concatenate([rank_tokens(lengths, context, other) for other in range(context)])
    row_of = np.empty_like(gathered)
    row_of[gathered] = np.arange(len(gathered))
    return np.concatenate([row_of[run.start : run.start + run.keys] for run in rank_runs(lengths, context, rank)])


def _chunks(context: int) -> int:
    return 1 if context == 1 else 2 * context
