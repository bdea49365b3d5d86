# SPDX-License-Identifier: Apache-2.0
"""Serve prompts in epochs, each in a seeded order, with a cursor that a checkpoint can restore."""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.errors import CheckpointError
from megarl.sampler.seeds import seed_from
from megarl.tasks.base import Task
from megarl.types import Prompt


class Place(NamedTuple):
    """The place of a prompt in the stream.

    Attributes:
        epoch: number of the epoch.
        position: number of the prompt in the epoch's order.
        row: index of the prompt in the data.
    """

    epoch: int
    position: int
    row: int


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt, its token ids ``[P]`` int64, and its place in the stream; None outside of a stream."""

    prompt: Prompt
    ids: np.ndarray
    place: Place | None = None


def seed_of(seed: int, place: Place) -> int:
    """Return the 31-bit seed of a prompt's samples: the same for every engine, order and attempt."""
    return seed_from(seed, place.epoch, place.position)


class PromptStream:
    """Endless batches of prompts; each epoch visits every prompt once, in an order drawn from the seed.

    A batch of ``next`` that crosses the end of an epoch holds no prompt twice (unless it is larger than the data set):
    the new epoch begins with prompts that the batch does not hold yet.

    Attributes:
        epoch, position: the next prompt is number ``position`` (from 0) in the order of this epoch.
    """

    def __init__(self, task: Task, encode: Callable[[Prompt], np.ndarray], seed: int) -> None:
        """Start at the first prompt of the first epoch.

        Args:
            task: the task; must have prompts.
            encode: function: prompt -> token ids.
            seed: seed of the order.
        """
        self.task, self.encode, self.seed = task, encode, seed
        self.epoch, self.position = 0, 0
        # The prompts that the batch held when this epoch began, and how many more the batch took.
        self._held: list[int] = []
        self._taken = 0
        self._again: list[Place] = []
        self._order = self._shuffled()
        self._ready: dict[Place, Future[EncodedPrompt]] = {}
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def _shuffled(self) -> np.ndarray:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.task))
        if not self._held:
            return order
        times = np.bincount(self._held, minlength=len(order))
        first = order[np.argsort(times[order], kind="stable")][: self._taken]
        return np.concatenate([first, order[~np.isin(order, first)]])

    def next(self, count: int) -> list[EncodedPrompt]:
        """Return the next ``count`` prompts, across the end of an epoch if need be; those to be repeated come first."""
        places = self._take(count)
        ready, self._ready = self._ready, {}
        return [ready[place].result() if place in ready else self._encoded(place) for place in places]

    def repeat(self, places: Iterable[Place]) -> None:
        """Return these prompts again, before the next ones: what was drawn of them is not trained on."""
        self._again = [*self._again, *places]

    def first(self) -> np.ndarray:
        """Return the token ids of the first prompt of the data, wherever the cursor is."""
        return self._encoded(Place(0, 0, 0)).ids

    def prepare(self, count: int) -> None:
        """Start to encode, in a thread, the prompts that ``next(count)`` will return.

        Does not move the cursor.
        """
        ahead = copy.copy(self)._take(count)
        self._ready = {place: self._encoder.submit(self._encoded, place) for place in ahead}

    def _encoded(self, place: Place) -> EncodedPrompt:
        prompt = self.task[place.row]
        return EncodedPrompt(prompt, self.encode(prompt), place)

    def _take(self, count: int) -> list[Place]:
        """Return the places of the next prompts and move the cursor."""
        again, self._again = self._again[:count], self._again[count:]
        return again + self._advance(count - len(again))

    def _advance(self, count: int) -> list[Place]:
        indices: list[int] = []
        places: list[Place] = []
        while len(indices) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._held, self._taken = list(indices), count - len(indices)
                self._order = self._shuffled()
            part = self._order[self.position : self.position + count - len(indices)].tolist()
            places += [Place(self.epoch, self.position + i, index) for i, index in enumerate(part)]
            indices += part
            self.position += len(part)
        return places

    def state(self) -> dict[str, Any]:
        """Return the cursor, as JSON-able values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "held": self._held,
            "taken": self._taken,
            "again": [list(place) for place in self._again],
            "size": len(self.task),
            "seed": self.seed,
        }

    def begin_epoch(self, epoch: int) -> None:
        """Move the cursor to the first prompt of an epoch."""
        self.epoch, self.position, self._held, self._taken, self._again = epoch, 0, [], 0, []
        self._order = self._shuffled()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a cursor from ``state()``.

        Raises:
            CheckpointError: the state is of a data set of another size, or of another seed.
        """
        if (state["size"], state["seed"]) != (len(self.task), self.seed):
            raise CheckpointError(
                f"the checkpoint's data has {state['size']} prompts in the order of seed {state['seed']}, this run's "
                f"{len(self.task)} in that of train.seed {self.seed}; resume with the same task and seed"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._held, self._taken = state.get("held", []), state.get("taken", 0)
        self._again = [Place(*place) for place in state.get("again", [])]
        self._order = self._shuffled()
