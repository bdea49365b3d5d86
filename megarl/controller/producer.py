# SPDX-License-Identifier: Apache-2.0
"""Keep the engines busy in a thread: send prompts, score what comes back, and fill the buffer."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import xxhash

from megarl.config import RunConfig
from megarl.controller.actor_handles import SamplerGroup
from megarl.controller.buffer import GroupBuffer, ScoredGroup
from megarl.controller.data import EncodedPrompt, Place, PromptStream
from megarl.controller.rollout import Rollout
from megarl.errors import WorkerError
from megarl.types import Completion

# Seconds that the thread waits for completions before it looks whether more may start.
LOOK_SECONDS = 0.05

Score = Callable[[Sequence[EncodedPrompt], Sequence[Sequence[Completion]]], Rollout]


class Running(NamedTuple):
    """A prompt that an engine works on.

    Attributes:
        engine: index of the engine.
        prompt: the prompt.
        place: its place in the stream.
        since: when it was sent, monotonic seconds.
    """

    engine: int
    prompt: EncodedPrompt
    place: Place
    since: float


class Producer:
    """Samples and scores groups ahead of the trainer, at most as far as ``train.max_staleness`` allows.

    A group is started only if, with those before it, it is trained on at most ``max_staleness`` versions later. Each
    goes to the engine with the fewest groups. Used as a context manager: the thread runs in the block.

    Attributes:
        without_signal: number of groups that were left out since the last ``advance``, because they have no signal.
        stale: number of groups since the last ``advance`` whose prompts are repeated, because they got too old.
    """

    def __init__(
        self, config: RunConfig, samplers: SamplerGroup, stream: PromptStream, score: Score, *, step: int, version: int
    ) -> None:
        """
        Args:
            config: the run's config.
            samplers: the engines.
            stream: the prompts; only this object uses it from now on.
            score: function: prompts, completions -> the rollout. Called in a thread.
            step: number of steps done.
            version: current policy version.
        """
        self._config, self._samplers, self._stream, self._score = config, samplers, stream, score
        self._step, self._version = step, version
        self._buffer = GroupBuffer()
        self._in_training = 0  # groups that were taken in the present step
        self._running: dict[Any, Running] = {}
        self._scoring: dict[Place, Future] = {}
        self._lock = threading.RLock()  # of all that a checkpoint describes
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self.without_signal = self.stale = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop; requests that still run are cancelled in their engines."""
        self._end.set()
        self._thread.join()
        self._samplers.cancel(list(self._running))
        self._scorer.shutdown(wait=not any(exception), cancel_futures=True)

    def take(self) -> list[ScoredGroup]:
        """Return the oldest ``train.prompts_per_step`` groups that are complete and young enough; wait for them.

        Raises:
            MegarlError: sampling or scoring failed.
        """
        count, watch = self._config.train.prompts_per_step, self._samplers.watch
        while True:
            self._buffer.wait_for(count, watch.check)
            with self._lock:
                if self._config.train.stale_groups == "repeat":
                    self._repeat_stale()
                if len(self._buffer) >= count:
                    self._in_training = count
                    return self._buffer.pop(count)

    def advance(self, step: int, version: int) -> None:
        """Tell the producer of a step and the version that engines now sample from; resets the counters."""
        with self._lock:
            self._step, self._version, self._in_training = step, version, 0
            self.without_signal = self.stale = 0

    def stream_state(self) -> dict[str, Any]:
        """Return the stream's state in which every prompt that was not taken yet comes again."""
        with self._lock:
            running = [running.place for running in self._running.values()]
            open_places = [*running, *self._scoring, *self._buffer.places()]
            state = self._stream.state()
            again = sorted({Place(*place) for place in [*state["again"], *open_places]})
            return state | {"again": [list(place) for place in again]}

    def _repeat_stale(self) -> None:
        """Send the prompts of groups that are too old to the engines again."""
        stale = self._buffer.remove_older(self._version - self._config.train.max_staleness)
        self._stream.repeat(group.place for group in stale)
        self.stale += len(stale)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._start_groups()
                self._collect()
        except BaseException as error:
            self._buffer.fail(error)

    def _may_start(self) -> bool:
        """Return True if another group would be trained on within the bound, and before the run's last step ends."""
        train = self._config.train
        ahead = self._in_training + len(self._running) + len(self._scoring) + len(self._buffer)
        batch = self._step + ahead // train.prompts_per_step
        version = self._version + (batch - self._step) * train.updates_per_step
        return batch < train.steps and version - self._version <= train.max_staleness

    def _start_groups(self) -> None:
        while True:
            with self._lock:
                if not self._may_start():
                    return
                [prompt] = self._stream.next(1)
                load = [0] * len(self._samplers.engines)
                for running in self._running.values():
                    load[running.engine] += 1
                engine = load.index(min(load))
                assert prompt.place is not None
                reference = self._samplers.start(engine, prompt.ids, seed_of(self._config.sampler.seed, prompt.place))
                self._running[reference] = Running(engine, prompt, prompt.place, time.monotonic())

    def _collect(self) -> None:
        """Score the groups that are complete; refuse to wait longer than ``sampler.generate_seconds`` for one."""
        for reference, completions in self._samplers.finished(list(self._running), LOOK_SECONDS):
            with self._lock:
                done = self._running.pop(reference)
                self._scoring[done.place] = self._scorer.submit(self._score, [done.prompt], [completions])
        for place, future in list(self._scoring.items()):
            if future.done():
                group = ScoredGroup(place, future.result())
                with self._lock:
                    del self._scoring[place]
                    if self._is_left_out(group):
                        self.without_signal += 1
                    else:
                        self._buffer.put([group])
        limit = self._config.sampler.generate_seconds
        for running in self._running.values():
            if time.monotonic() - running.since > limit:
                raise WorkerError(
                    f"sampler {running.engine} did not answer prompt '{running.prompt.prompt.id}' within "
                    f"sampler.generate_seconds ({limit:g} s)"
                )
        if not self._running:
            self._end.wait(LOOK_SECONDS)

    def _is_left_out(self, group: ScoredGroup) -> bool:
        """Return True if another prompt replaces the group's; ``train.max_resample_factor`` bounds how often."""
        train = self._config.train
        left = self.without_signal < (train.max_resample_factor - 1) * train.prompts_per_step
        return self._config.loss.groups_without_signal == "resample" and left and not group.rollout.signals[0]


def seed_of(seed: int, place: Place) -> int:
    """Return the 31-bit seed of a prompt's samples: the same for every engine, order and attempt."""
    return xxhash.xxh3_64_intdigest(repr((seed, place.epoch, place.position)).encode()) >> 33
