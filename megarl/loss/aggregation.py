# SPDX-License-Identifier: Apache-2.0
"""Weigh per-token losses such that their sum is the step's loss, with weights fixed before the first backward pass."""

from typing import Literal

import numpy as np

from megarl.errors import LossInputError

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def sequence_weights(response_tokens_S: np.ndarray, aggregation: Aggregation, max_response_tokens: int) -> np.ndarray:
    """Return the weight of each response token of sequence s. The step's loss is the sum of weight * per-token loss.

    Call it once with all sequences of an optimizer step, over all data-parallel ranks. The denominators then belong to
    the step, and the sum does not depend on packing, micro-batches or ranks. (With a mean per micro-batch, the weight
    of a token would depend on the other tokens of its micro-batch.)

    N_s is the entry of ``response_tokens_S`` for sequence s, and S the number of sequences:

    - ``token_mean``: 1 / sum(N). All tokens weigh the same (DAPO, arXiv:2503.14476, equation 8; TRL ``"dapo"``, and
      ``"bnpo"`` for a batch in one piece).
    - ``sequence_mean``: 1 / (S * N_s). All sequences weigh the same (GRPO, arXiv:2402.03300, equation 3; TRL
      ``"grpo"``). A sequence without response tokens adds 0 and still counts in S.
    - ``constant``: 1 / (S * max_response_tokens). The weight does not depend on lengths (Dr. GRPO, arXiv:2503.20783;
      TRL ``"dr_grpo"``).

    Args:
        response_tokens_S: ``[S]`` integers >= 0, the number of response tokens of every sequence of the step.
        aggregation: one of the above.
        max_response_tokens: ``sampler.max_response_tokens``, used by ``constant``.

    Returns:
        ``[S]`` float64; 0 for sequences without response tokens.

    Raises:
        LossInputError: ``response_tokens_S`` is not a vector of counts, it is empty, or ``aggregation`` is unknown.
    """
    counts_S = np.asarray(response_tokens_S)
    if counts_S.ndim != 1 or not counts_S.size or not np.issubdtype(counts_S.dtype, np.integer):
        raise LossInputError(
            f"response_tokens_S has shape {counts_S.shape} and dtype {counts_S.dtype}; "
            "it must be a vector of integers, one per sequence"
        )
    if (counts_S < 0).any():
        raise LossInputError(f"response_tokens_S holds {counts_S.min()}; counts must not be negative")
    if max_response_tokens < 1:
        raise LossInputError(f"max_response_tokens is {max_response_tokens}; it must be at least 1")
    if aggregation == "token_mean":
        denominators_S = np.full(counts_S.shape, counts_S.sum(), dtype=np.float64)
    elif aggregation == "sequence_mean":
        denominators_S = counts_S.size * counts_S.astype(np.float64)
    elif aggregation == "constant":
        denominators_S = np.full(counts_S.shape, float(counts_S.size * max_response_tokens))
    else:
        raise LossInputError(
            f"loss.aggregation is '{aggregation}'; it must be 'token_mean', 'sequence_mean' or 'constant'"
        )
    return np.where(counts_S > 0, 1.0 / np.where(counts_S > 0, denominators_S, 1.0), 0.0)
