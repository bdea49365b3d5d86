# SPDX-License-Identifier: Apache-2.0
"""Hold scored groups between the producer and the trainer."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config import RunConfig
from megarl.controller.rollouts.data import Place
from megarl.controller.rollouts.rollout import Rollout
from megarl.errors import ConfigError

# The version of a group without tokens, which never gets too old.
NEVER_OLD = np.iinfo(np.int64).max
# Bytes of a token that was drawn: its id and version, its logprob, and a letter of text.
TOKEN_BYTES = 8 + 8 + 4 + 1
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


def check_memory(config: RunConfig, free: int) -> None:
    """Refuse a buffer that may not fit into memory: it is full when every completion is as long as it may be.

    Args:
        config: the run's config; a synchronous run holds the groups of one step.
        free: memory of the controller's host that is free, bytes.

    Raises:
        ConfigError: the groups that the run may hold take more.
    """
    train, sampler = config.train, config.sampler
    groups = (train.max_staleness // train.updates_per_step + 1) * train.prompts_per_step
    needed = groups * sampler.samples_per_prompt * sampler.max_response_tokens * TOKEN_BYTES
    if needed > free:
        raise ConfigError(
            f"the run may hold {groups} groups (train.prompts_per_step {train.prompts_per_step}, train.max_staleness "
            f"{train.max_staleness}) of {sampler.samples_per_prompt} completions (sampler.samples_per_prompt) of "
            f"{sampler.max_response_tokens} tokens (sampler.max_response_tokens): {needed / 2**30:.1f} GiB, and this "
            f"host has {free / 2**30:.1f} GiB of memory free; lower one of them"
        )


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
