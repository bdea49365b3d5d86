# SPDX-License-Identifier: Apache-2.0
"""Serve prompts in epochs, each in a seeded order, with a cursor that a checkpoint can restore."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import CheckpointError
from megarl.tasks.base import Task
from megarl.types import Prompt


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids ``[P]`` int64."""

    prompt: Prompt
    ids: np.ndarray


class PromptStream:
    """Endless batches of prompts; each epoch visits every prompt once, in an order drawn from the seed.

    A batch that crosses the end of an epoch holds no prompt twice (unless it is larger than the data set): the new
    epoch begins with prompts that the batch does not hold yet.

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
        self._order = self._shuffled()
        self._ready: dict[int, Future[EncodedPrompt]] = {}
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def _shuffled(self) -> np.ndarray:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.task))
        if not self._held:
            return order
        times = np.bincount(self._held, minlength=len(order))
        first = order[np.argsort(times[order], kind="stable")][: self._taken]
        return np.concatenate([first, order[~np.isin(order, first)]])

    def next(self, count: int) -> list[EncodedPrompt]:
        """Return the next ``count`` prompts, across the end of an epoch if need be."""
        indices = self._take(count)
        ready, self._ready = self._ready, {}
        return [ready[index].result() if index in ready else self._encoded(index) for index in indices]

    def first(self) -> np.ndarray:
        """Return the token ids of the first prompt of the data, wherever the cursor is."""
        return self._encoded(0).ids

    def prepare(self, count: int) -> None:
        """Start to encode, in a thread, the prompts that ``next(count)`` will return.

        Does not move the cursor.
        """
        ahead = copy.copy(self)._take(count)
        self._ready = {index: self._encoder.submit(self._encoded, index) for index in ahead}

    def _encoded(self, index: int) -> EncodedPrompt:
        prompt = self.task[index]
        return EncodedPrompt(prompt, self.encode(prompt))

    def _take(self, count: int) -> list[int]:
        """Return the indices of the next prompts and move the cursor."""
        indices: list[int] = []
        while len(indices) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._held, self._taken = list(indices), count - len(indices)
                self._order = self._shuffled()
            part = self._order[self.position : self.position + count - len(indices)]
            indices += part.tolist()
            self.position += len(part)
        return indices

    def state(self) -> dict[str, Any]:
        """Return the cursor, as JSON-able values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "held": self._held,
            "taken": self._taken,
            "size": len(self.task),
            "seed": self.seed,
        }

    def begin_epoch(self, epoch: int) -> None:
        """Move the cursor to the first prompt of an epoch."""
        self.epoch, self.position, self._held, self._taken = epoch, 0, [], 0
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
        self._order = self._shuffled()
