# SPDX-License-Identifier: Apache-2.0
"""Keep the engines busy in a thread: send prompts, score what comes back, and fill the buffer."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from megarl.config import RunConfig
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.rollouts.buffer import GroupBuffer, ScoredGroup
from megarl.controller.rollouts.data import EncodedPrompt, Place, PromptStream, seed_of
from megarl.controller.rollouts.playing.episodes import Episodes
from megarl.controller.rollouts.rollout import Rollout
from megarl.environments.episode import Played
from megarl.types import Completion

# Seconds that the thread waits for completions before it looks whether more may start.
LOOK_SECONDS = 0.05

# What an engine made of each sample of a prompt: completions, or episodes that were played.
Answers = Sequence[Completion] | Sequence[Played]
Score = Callable[[Sequence[EncodedPrompt], Sequence[Any]], Rollout]


class Running(NamedTuple):
    """A prompt that is sampled.

    Attributes:
        prompt: the prompt.
        place: its place in the stream.
    """

    prompt: EncodedPrompt
    place: Place


class Producer:
    """Samples and scores groups ahead of the trainer, at most as far as ``train.max_staleness`` allows.

    A group is started only if the batch that it will belong to begins at most ``max_staleness`` versions later. Used
    as a context manager: the thread runs in the block.
    """

    def __init__(
        self,
        config: RunConfig,
        samplers: SamplerGroup | Episodes,
        stream: PromptStream,
        score: Score,
        *,
        step: int,
        version: int,
    ) -> None:
        """
        Args:
            config: the run's config.
            samplers: the engines, or what plays episodes on them.
            stream: the prompts; in the block, only this object uses it.
            score: function: prompts, answers of each -> the rollout. Called in a thread.
            step: number of steps done.
            version: current policy version.
        """
        self._config, self._samplers, self._stream, self._score = config, samplers, stream, score
        self._step, self._version = step, version
        self._buffer = GroupBuffer()
        self._taken: list[Place] = []  # groups of the present step
        self._running: dict[Any, Running] = {}
        self._unscored: list[tuple[Running, Answers]] = []
        self._scoring: tuple[list[Place], Future[list[Rollout]]] | None = None
        self._left_out = self._repeated = self._stale = 0  # in the present step
        self._lock = threading.RLock()  # of all that a checkpoint describes
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

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
        count = self._config.train.prompts_per_step
        while True:
            self._buffer.wait_for(count, self._samplers.look)
            with self._lock:
                if self._config.train.stale_groups == "repeat":
                    self._repeat_stale()
                if len(self._buffer) >= count:
                    self._taken = self._buffer.places()[:count]  # first: Ctrl-C may come in between
                    groups = self._buffer.pop(count)
                    self._stale = sum(group.oldest < self._oldest() for group in groups)
                    return groups

    def fill(self) -> dict[str, float]:
        """Return how many groups wait for the trainer, and how many are sampled or scored."""
        with self._lock:
            return {
                "buffered_groups": float(len(self._buffer)),
                "running_groups": float(len(self._sampled_places())),
            }

    def advance(self, step: int, version: int) -> dict[str, float]:
        """Tell the producer that a step is done, and the version that engines now sample from.

        Returns:
            Metrics of the step: ``left_out_groups`` had no signal and were replaced, ``repeated_groups`` got too old
            and are sampled again, ``stale_groups`` got too old and were trained on.
        """
        with self._lock:
            counted = {
                "left_out_groups": float(self._left_out),
                "repeated_groups": float(self._repeated),
                "stale_groups": float(self._stale),
            }
            self._step, self._version, self._taken = step, version, []
            self._left_out = self._repeated = self._stale = 0
            return counted

    def stream_state(self) -> dict[str, Any]:
        """Return the stream's state in which every prompt that is not trained on yet comes again."""
        with self._lock:
            open_places = [*self._sampled_places(), *self._buffer.places(), *self._taken]
            state = self._stream.state()
            again = sorted({Place(*place) for place in [*state["again"], *open_places]})
            return state | {"again": [list(place) for place in again]}

    def _oldest(self) -> int:
        """Return the oldest version that is young enough."""
        return self._version - self._config.train.max_staleness

    def _repeat_stale(self) -> None:
        """Send the prompts of groups that are too old to the engines again."""
        stale = self._buffer.older(self._oldest())
        self._stream.repeat(stale)  # first: Ctrl-C may come in between
        self._buffer.remove(stale)
        self._repeated += len(stale)

    def _sampled_places(self) -> list[Place]:
        """Return the places of the prompts that are sampled or scored now."""
        scoring = self._scoring[0] if self._scoring else []
        return [*(r.place for r in self._running.values()), *(r.place for r, _ in self._unscored), *scoring]

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
        ahead = len(self._taken) + len(self._sampled_places()) + len(self._buffer)
        batch = self._step + ahead // train.prompts_per_step
        version = self._version + (batch - self._step) * train.updates_per_step
        return batch < train.steps and version - self._version <= train.max_staleness

    def _start_groups(self) -> None:
        while True:
            with self._lock:
                if not self._may_start():
                    return
                [prompt] = self._stream.next(1)
                assert prompt.place is not None
                future = self._samplers.start(prompt, seed_of(self._config.sampler.seed, prompt.place))
                self._running[future] = Running(prompt, prompt.place)

    def _collect(self) -> None:
        """Take what is complete, and score it."""
        for future, completions in self._samplers.finished(list(self._running), LOOK_SECONDS):
            with self._lock:
                self._unscored.append((self._running.pop(future), completions))
        self._keep_scored()
        self._score_next()
        if not self._running:
            self._end.wait(LOOK_SECONDS)

    def _keep_scored(self) -> None:
        """Put the groups that have been scored into the buffer."""
        if self._scoring is None or not self._scoring[1].done():
            return
        places, rollouts = self._scoring[0], self._scoring[1].result()
        with self._lock:
            self._scoring = None
            for group in map(ScoredGroup, places, rollouts):
                if self._is_left_out(group):
                    self._left_out += 1
                else:
                    self._buffer.put([group])

    def _score_next(self) -> None:
        """Score all that has arrived in one call, so that rewards of several prompts are computed together."""
        if self._scoring is not None or not self._unscored:
            return
        with self._lock:
            batch, self._unscored = self._unscored, []
            prompts, completions = [running.prompt for running, _ in batch], [answers for _, answers in batch]
            future = self._scorer.submit(lambda: self._score(prompts, completions).split())
            self._scoring = [running.place for running, _ in batch], future

    def _is_left_out(self, group: ScoredGroup) -> bool:
        """Return True if another prompt replaces the group's; ``train.max_resample_factor`` bounds how often."""
        train = self._config.train
        left = self._left_out < (train.max_resample_factor - 1) * train.prompts_per_step
        return self._config.loss.groups_without_signal == "resample" and left and not group.rollout.signals[0]
