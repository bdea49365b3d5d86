# SPDX-License-Identifier: Apache-2.0
"""Find the tokens that have a gradient, so that the others cost nothing in a backward pass.

Shape letters: T tokens, A of them with a gradient, C tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from megarl.cuda_memory import download


class ActiveTokens:
    """The tokens with a gradient, in order. Where all have one, which is common, nothing is gathered.

    Attributes:
        count: A.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], chunk: int | None) -> None:
        """Find them. The host waits for the device once.

        Args:
            gradients: ``[T]`` each; a token is active if one of them is not 0.
            chunk: C, if ``kept_parts`` will be called.
        """
        marks, *others = (gradient != 0 for gradient in gradients)
        for other in others:
            marks = marks | other
        counts = download(_counts(marks, chunk or max(1, len(marks))))
        self._chunk, self._counts = chunk, counts().tolist()
        self.count = sum(self._counts)
        self._all = self.count == len(marks)
        if not self._all:
            # Of known size, so that the host need not wait again.
            self._index = marks.nonzero_static(size=self.count).squeeze(1)

    def of(self, tensor: torch.Tensor, part: slice) -> torch.Tensor:
        """Return rows of ``tensor [T, ...]``: those of a slice of the active tokens."""
        return tensor[part] if self._all else tensor[self._index[part]]

    def tokens(self, part: slice) -> torch.Tensor | slice:
        """Return the places among all tokens of a slice of the active ones."""
        return part if self._all else self._index[part]

    def spread(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return ``rows [A, ...]`` at their places in ``[T, ...]``, with zeros elsewhere."""
        return rows if self._all else torch.zeros_like(like).index_copy_(0, self._index, rows)

    def parts(self, size: int) -> Iterator[slice]:
        """Yield slices of at most ``size`` active tokens."""
        for start in range(0, self.count, size):
            yield slice(start, min(start + size, self.count))

    def kept_parts(self, kept: list[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield for each chunk of all tokens: the slice of its active tokens, and their rows. Skip chunks without any.

        Args:
            kept: ``[C, ...]`` of every chunk; emptied, so that a chunk's memory is free once the caller drops it.
        """
        kept.reverse()
        for chunk, (begin, end) in enumerate(pairwise(accumulate(self._counts, initial=0))):
            rows = kept.pop()
            if end - begin < len(rows):
                rows = rows[self._index[begin:end] - chunk * (self._chunk or 0)]
            if end > begin:
                yield slice(begin, end), rows


def _counts(marks: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return how many tokens of each chunk are marked."""
    number = -(-len(marks) // chunk)
    return F.pad(marks, (0, number * chunk - len(marks))).view(number, chunk).sum(1)
