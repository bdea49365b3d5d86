# SPDX-License-Identifier: Apache-2.0
"""Compare the sampler's logprobs of some completions with the trainer's, token by token, for the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megarl.controller.rollouts.rollout import Rollout, to_sample
from megarl.run_folder import shown
from megarl.types import Sample

# Computes the logprobs of the response tokens of samples: each float32 ``[R]``.
LogprobsOf = Callable[[list[Sample]], Sequence[np.ndarray]]


def with_trainer_logprobs(rollout: Rollout, count: int, logprobs_of: LogprobsOf) -> Rollout:
    """Return the rollout with the trainer's logprobs of the completions that a report shows.

    Args:
        rollout: of a step.
        count: number of sequences.
        logprobs_of: the trainer; not called if there is nothing to compare.
    """
    rows = [
        ((prompt, index, number), reward.score, sequence)
        for prompt, (group, rewards) in enumerate(zip(rollout.trajectories, rollout.rewards, strict=True))
        for index, (trajectory, reward) in enumerate(zip(group, rewards, strict=True))
        for number, sequence in enumerate(trajectory.sequences)
    ]
    chosen = [rows[place] for place in shown([score for _, score, _ in rows], count)]
    if not chosen:
        return rollout
    values = logprobs_of([to_sample(sequence, 0.0, 0) for *_, sequence in chosen])
    return replace(rollout, trainer_logprobs={row[0]: value for row, value in zip(chosen, values, strict=True)})
