# SPDX-License-Identifier: Apache-2.0
"""Hold scored groups between the producer and the trainer."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.controller.rollouts.data import Place
from megarl.controller.rollouts.rollout import Rollout

# The version of a group without tokens, which never gets too old.
NEVER_OLD = np.iinfo(np.int64).max
# Seconds between two checks that the participants live, while the trainer waits.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class ScoredGroup:
    """The scored completions of one prompt.

    Attributes:
        place: the prompt's place in the stream.
        rollout: the completions; its lists have one entry.
    """

    place: Place
    rollout: Rollout

    @property
    def oldest(self) -> int:
        """The oldest policy version that made a token of the group."""
        versions = np.concatenate([one.versions for one in self.rollout.trajectories[0]])
        return int(versions.min(initial=NEVER_OLD))


class GroupBuffer:
    """Groups that wait for the trainer; used by several threads."""

    def __init__(self) -> None:
        self._groups: list[ScoredGroup] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: Sequence[ScoredGroup]) -> None:
        """Add groups."""
        with self._changed:
            self._groups = sorted([*self._groups, *groups], key=lambda group: group.place)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make ``wait_for`` raise this error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def wait_for(self, count: int, check: Callable[[], None]) -> None:
        """Wait until ``count`` groups are here.

        Args:
            count: number of groups.
            check: called now and then; what it raises ends the wait.

        Raises:
            BaseException: the producer's error.
        """
        with self._changed:
            while self._failure is None and len(self._groups) < count:
                self._changed.wait(LOOK_SECONDS)
                check()
            if self._failure is not None:
                raise self._failure

    def pop(self, count: int) -> list[ScoredGroup]:
        """Remove and return the ``count`` groups that are first in the stream."""
        with self._changed:
            popped, self._groups = self._groups[:count], self._groups[count:]
            return popped

    def older(self, version: int) -> list[Place]:
        """Return the places of groups with a token that is older than ``version``."""
        with self._changed:
            return [group.place for group in self._groups if group.oldest < version]

    def remove(self, places: Sequence[Place]) -> None:
        """Remove the groups with these places."""
        with self._changed:
            self._groups = [group for group in self._groups if group.place not in places]

    def places(self) -> list[Place]:
        """Return the places of all groups."""
        with self._changed:
            return [group.place for group in self._groups]
