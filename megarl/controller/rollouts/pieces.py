# SPDX-License-Identifier: Apache-2.0
"""Split the text of a completion into the pieces that its tokens add."""

from collections.abc import Callable

import numpy as np

# Decoders write this where a character is not complete yet.
INCOMPLETE = "\ufffd"
# Tokens before a piece that are decoded with it, since some tokenizers treat the first token in a special way.
CONTEXT = 4


def pieces_of(ids: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[str]:
    """Return the text that each token adds; together they are the whole text.

    A token that only begins a character adds nothing, and so does a special token where ``decode`` drops it.

    Args:
        ids: ``[N]``.
        decode: function: ids -> text.
    """
    pieces: list[str] = []
    start = done = 0  # decoded are tokens from ``start`` on; the text of those before ``done`` has been given out
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[start:done]), decode(ids[start:end])
        if len(after) <= len(before) or (after.endswith(INCOMPLETE) and end < len(ids)):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        start, done = max(start, done - CONTEXT), end
    return pieces
