# SPDX-License-Identifier: Apache-2.0
"""Partition packed sequences over context-parallel (CP) ranks. Pure index arithmetic, the same on every rank.

Each sequence of a pack is padded to a multiple of 2 * CP tokens and cut into 2 * CP equal chunks. Rank i holds chunk i
and then chunk 2 * CP - 1 - i. A token of chunk c attends to c whole chunks and to the part of its own chunk before it.
Every rank therefore attends to the same number of keys, whatever the lengths: the load is equal. The partition is that
of Transformer Engine's thd format (``thd_get_partitioned_indices``). A pack of several sequences lists both chunks of
the first sequence, then of the second, and so on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """A run: consecutive tokens of one sequence on a rank.

    Attributes:
        start: first token of the sequence in the whole pack.
        before: number of tokens of the sequence before the run.
        length: number of tokens in the run.
    """

    start: int
    before: int
    length: int

    @property
    def keys(self) -> int:
        """Number of keys that the run's last token attends to: the sequence up to the run's end."""
        return self.before + self.length


def padded_length(length: int, context: int) -> int:
    """Return the padded length of a sequence: the next multiple of 2 * CP, or ``length`` itself without CP."""
    chunks = _chunks(context)
    return -(-length // chunks) * chunks


def rank_runs(lengths: Sequence[int], context: int, rank: int) -> list[Run]:
    """Return the runs that a rank holds, in order: two per sequence, or the whole sequence without CP.

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
    """Return a rank's tokens as indices into the whole pack, in the rank's order: int64 ``[sum(lengths) / CP]``."""
    runs = rank_runs(lengths, context, rank)
    return np.concatenate([np.arange(run.start + run.before, run.start + run.keys) for run in runs])


def key_rows(lengths: Sequence[int], context: int, rank: int) -> np.ndarray:
    """Return the rows of the gathered pack that hold the keys of a rank's runs, run after run: int64.

    The gathered pack holds all ranks' tokens, rank after rank. A row occurs at most twice: once in each run of its
    sequence.
    """
    gathered = np.concatenate([rank_tokens(lengths, context, other) for other in range(context)])
    row_of = np.empty_like(gathered)
    row_of[gathered] = np.arange(len(gathered))
    return np.concatenate([row_of[run.start : run.start + run.keys] for run in rank_runs(lengths, context, rank)])


def _chunks(context: int) -> int:
    return 1 if context == 1 else 2 * context
