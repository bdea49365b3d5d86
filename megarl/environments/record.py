# SPDX-License-Identifier: Apache-2.0
"""Make training sequences of the calls of an episode: who said each token is known from what was sent and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.types import Completion


@dataclass
class Call:
    """One request to the policy.

    Attributes:
        sent: the ids that it saw, int64 ``[P]``.
        drawn: the answer, or None as long as there is none.
        given_up: True if nobody waits for the answer any more.
    """

    sent: np.ndarray
    drawn: Completion | None = None
    given_up: bool = False


@dataclass
class _Branch:
    """A sequence that grows.

    Attributes:
        prompt: ids before the first drawn token.
        parts: ids after them, each with whether it was drawn.
        calls: the answers.
    """

    prompt: np.ndarray
    parts: list[tuple[np.ndarray, bool]] = field(default_factory=list)
    calls: list[Completion] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """Return all ids so far."""
        return np.concatenate([self.prompt, *(ids for ids, _ in self.parts)])

    def add(self, given: np.ndarray, drawn: Completion) -> None:
        """Append ids that were given, then those that were drawn after them."""
        self.parts += [(given, False), (drawn.response_ids, True)]
        self.calls.append(drawn)

    def sequence(self) -> Completion:
        """Return it as a training sequence, which ends with a drawn token."""
        return Completion(
            prompt_ids=self.prompt,
            response_ids=np.concatenate([ids for ids, _ in self.parts]),
            logprobs=np.concatenate([one.logprobs for one in self.calls]),
            versions=np.concatenate([one.versions for one in self.calls]),
            finish_reason=self.calls[-1].finish_reason,
            drawn=np.concatenate([np.full(len(ids), drawn) for ids, drawn in self.parts]),
        )


def sequences_of(calls: Sequence[Call]) -> tuple[Completion, ...]:
    """Return the training sequences of an episode.

    A call whose ids begin with all of an earlier sequence extends the longest such sequence: the ids in between were
    said by a tool or a user, and are masked. Any other call begins a sequence, whose prompt is all that was sent;
    tokens in there that another sequence drew are trained on only in that one.

    Args:
        calls: in the order of their requests; those without an answer are left out.
    """
    branches: list[_Branch] = []
    for call in calls:
        if call.drawn is None:
            continue
        begun = [(len(branch.ids), branch) for branch in branches if _begins(call.sent, branch.ids)]
        if begun:
            length, branch = max(begun, key=lambda each: each[0])
        else:
            length, branch = len(call.sent), _Branch(call.sent)
            branches.append(branch)
        branch.add(call.sent[length:], call.drawn)
    return tuple(branch.sequence() for branch in branches)


def _begins(ids: np.ndarray, with_ids: np.ndarray) -> bool:
    return len(ids) >= len(with_ids) and np.array_equal(ids[: len(with_ids)], with_ids)
