# SPDX-License-Identifier: Apache-2.0
"""Call all trainer ranks as one."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from megarl.checkpoint_engine.senders import joined_endpoint, joined_sent
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig, TrainConfig
from megarl.controller.actors.calls import Limit, as_future, wait_all
from megarl.controller.actors.direct import DirectActor
from megarl.controller.actors.pulse import Watch
from megarl.futures import Joined, in_thread
from megarl.types import Sample

# Arguments of calls that are short.
SMALL = (bool, int, float, str, tuple, type(None))


class TrainerGroup:
    """All trainer ranks as one; also the ``Source`` of a weight sync.

    Args:
        ranks: the trainer actors, by rank.
        watch: tells which participants are alive.
        train: the ``train`` section; only its time limits are used.
    """

    def __init__(self, ranks: Sequence[Any], watch: Watch, train: TrainConfig) -> None:
        self.ranks, self.watch, self._train = list(ranks), watch, train
        self._adding: list[dict[str, Any]] = []
        self._direct = [DirectActor(name, watch, self.names) for name in self.names]

    @property
    def names(self) -> list[str]:
        """The names of the ranks, for messages."""
        return [f"trainer rank {index}" for index in range(len(self.ranks))]

    def check(self) -> None:
        """Raise ``LostError`` if a rank gives no sign of life."""
        self.watch.check(self.names)

    def wait(self, calls: dict[str, Any], limit: Limit | None = None, *, moving: bool = False) -> list[Any]:
        """Wait for calls of ranks; see ``wait_all``. All ranks must give signs of life."""
        return wait_all(calls, self.watch, limit, watched=self.names, moving=moving)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank and wait for all, at most ``train.save_seconds``.

        That limit is for calls that save or load; those that compute have their own.
        """
        return self.wait(self.start(method, *args), Limit("train.save_seconds", self._train.save_seconds))

    def start(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method on every rank without waiting."""
        # One copy per node, for any number of ranks. What is small comes with the call, milliseconds sooner.
        shared = [one if isinstance(one, SMALL) else ray.put(one) for one in args]
        return {name: getattr(rank, method).remote(*shared) for name, rank in zip(self.names, self.ranks, strict=True)}

    def start_on_rank_zero(self, method: str) -> Future:
        """Call a method on rank 0 only; return a future, which raises what ``wait_all`` raises."""
        return as_future({"trainer rank 0": getattr(self.ranks[0], method).remote()}, self.watch)

    def forward(self, samples: Sequence[Sample], adapter: bool | str = True) -> list[np.ndarray]:
        """Return the logprobs of the samples' response tokens; see ``RankTrainer``."""
        return self._trained(self.start("forward", list(samples), adapter))[0]

    def forward_backward(self, samples: Sequence[Sample], others: Sequence[int] = (), last: bool = True) -> None:
        """Start to add the gradient of samples to that of the optimizer step; see ``RankTrainer``.

        ``optim_step`` waits for it, so that the ranks do not wait in between.
        """
        self._adding.append(self.start("forward_backward", list(samples), list(others), last))

    def optim_step(self, rate: float) -> dict[str, float]:
        """Update the adapter once; return the metrics, which are the same on every rank. See ``RankTrainer``."""
        calls, self._adding = [*self._adding, self.start("optim_step", rate)], []
        return [self._trained(call)[0] for call in calls][-1]

    def release_memory(self) -> None:
        """Give memory that no tensor uses back to the GPUs, for engines that share them."""
        self.call("release_memory")

    def score(self, tokens: np.ndarray, seconds: float) -> np.ndarray:
        """Return the logprobs of a sequence; see ``TrainerRank.score``."""
        limit = Limit("checkpoint_engine.timeout_seconds", seconds)
        return self.wait(self.start("score", tokens), limit)[0]

    def places(self) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return in_thread(partial(self.wait, self.start("place")))

    def prepare(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int]) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return self._directly(partial(joined_endpoint, senders=senders), "prepare_sync", config, receivers, senders)

    def send(self, version: int, kind: Kind) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return self._directly(joined_sent, "send_weights", version, kind)

    def finish(self) -> Future:
        """See ``checkpoint_engine.participants.Source``. It does not overtake a transfer, which may not have begun."""
        return self._directly(itemgetter(0), "finish_sync")

    def _directly(self, join: Callable[[list], Any], method: str, *arguments: Any) -> Future:
        """Call a method on every rank over its connection; return one future of what ``join`` makes of the results."""
        lines = zip(self._direct, self.ranks, strict=True)
        return Joined([direct.call(rank, method, *arguments) for direct, rank in lines], join)

    def _trained(self, calls: dict[str, Any]) -> list[Any]:
        """Wait for calls that compute, at most ``train.update_seconds``."""
        return self.wait(calls, Limit("train.update_seconds", self._train.update_seconds), moving=True)
