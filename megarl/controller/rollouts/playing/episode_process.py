# SPDX-License-Identifier: Apache-2.0
"""Drive the process that plays episodes: ask engines for its turns, and watch its time."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.sections.eval import Sampling
from megarl.controller.rollouts.child import Child
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.environments.client import Limits
from megarl.environments.episode import Played
from megarl.errors import EpisodeError, MegarlError, first_few
from megarl.futures import results
from megarl.sampler.seeds import seed_from
from megarl.tasks import TaskContext
from megarl.tasks.base import Reward
from megarl.types import Completion

POLL_SECONDS = 0.2
# An episode is ended from inside at task.episode_seconds. If its code keeps the process busy, that cannot happen, and
# the run ends so many seconds later.
GRACE_SECONDS = 10.0

# Asks an engine for a turn: token ids ``[P]``, seed, how it is drawn -> the completion.
Ask = Callable[[np.ndarray, int, Sampling], "Future[Completion]"]


@dataclass
class _Group:
    """The episodes of one prompt.

    Attributes:
        ask, seed, sampling: see ``EpisodeProcess.start``.
        name: the prompt's id.
        future: takes the results.
        results: of each episode, None while it runs.
        numbers: of the episodes.
    """

    ask: Ask
    seed: int
    sampling: Sampling
    name: str
    future: "Future[list[Played]]"
    results: list[Played | None]
    numbers: list[int] = field(default_factory=list)


class EpisodeProcess(Child):
    """Plays episodes in a child process, which lives as long as the run and keeps any state of the environment."""

    def __init__(self, context: TaskContext, log: Path, model: str) -> None:
        """Start the process, which loads environment and tokenizer in the background.

        Args:
            context: the task's context; its limits are used.
            log: file of the process's output.
            model: folder of the model, for its tokenizer.
        """
        super().__init__("megarl.controller.rollouts.playing.episode_worker", log)
        self._task = context.config
        self._numbers, self._lock, self._sending = itertools.count(), threading.Lock(), threading.Lock()
        self._running: dict[int, tuple[_Group, int]] = {}
        self._begun: dict[int, float] = {}
        self.connection.send((context, model))
        self._reader = threading.Thread(target=self._read, name="episodes", daemon=True)
        self._reader.start()

    def start(self, prompt: EncodedPrompt, ask: Ask, seed: int, sampling: Sampling) -> "Future[list[Played]]":
        """Start the episodes of one prompt.

        Args:
            prompt: the prompt.
            ask: asks an engine for a turn.
            seed: of the prompt. Turn t of episode j is drawn with ``seed_from(seed, j, t)``.
            sampling: number of episodes, temperature, and most tokens of an episode.

        Returns:
            The results of the episodes. It raises ``EpisodeError`` if the environment did, ``MegarlError`` if the
            engines did.
        """
        task = self._task
        most = sampling.max_tokens
        limits = Limits(task.max_turns, most, min(task.max_turn_tokens or most, most), task.episode_seconds)
        group = _Group(ask, seed, sampling, prompt.prompt.id, Future(), [None] * sampling.samples)
        for index in range(sampling.samples):
            with self._lock:
                number = next(self._numbers)
                group.numbers.append(number)
                self._running[number] = (group, index)
            if not self._send(("play", number, prompt.prompt, prompt.ids, limits)):
                self._fail(group, self._death())
        return group.future

    def play(
        self,
        prompts: Sequence[EncodedPrompt],
        asks: Sequence[Ask],
        seeds: Sequence[int],
        sampling: Sampling,
        look: Callable[[], None] = lambda: None,
    ) -> list[list[Played]]:
        """Play the episodes of several prompts, and wait for them.

        Args:
            prompts: P.
            asks, seeds: of each; see ``start``.
            sampling: see ``start``.
            look: called every ``POLL_SECONDS``; what it raises ends the wait.
        """
        futures = [self.start(*each, sampling) for each in zip(prompts, asks, seeds, strict=True)]

        def check() -> None:
            self.check_time()
            look()

        try:
            return results(futures, POLL_SECONDS, check)
        except BaseException:
            self.cancel(futures)
            raise

    def dry_run(self, prompt: EncodedPrompt, ids: Sequence[int]) -> Reward:
        """Play one episode against a policy that says the same at each turn, and return its reward.

        Args:
            prompt: the prompt.
            ids: what that policy says: tokens of plain text, and one that ends a turn.

        Raises:
            EpisodeError: see ``start``; the message ends with the environment's own traceback.
        """

        def ask(sent: np.ndarray, seed: int, sampling: Sampling) -> "Future[Completion]":
            said = np.array(ids, dtype=np.int64)[: sampling.max_tokens]
            zeros = np.zeros(len(said))
            ended = "stop" if len(said) == len(ids) else "length"
            future: Future[Completion] = Future()
            future.set_result(Completion(sent, said, zeros.astype(np.float32), zeros.astype(np.int64), ended))
            return future

        most = self._task.max_turns * (len(ids) + 64)
        try:
            [[played]] = self.play([prompt], [ask], [0], Sampling(1, 1.0, 1.0, most))
            return played.reward
        except MegarlError as error:
            trace = getattr(error, "traceback_text", "")
            raise type(error)(f"dry run of the environment (task.reward_dry_run): {error}\n{trace}".rstrip()) from error

    def cancel(self, futures: Iterable["Future[list[Played]]"]) -> None:
        """Cancel episodes that nobody waits for any more."""
        unwanted = set(futures)
        with self._lock:
            numbers = [number for number, (group, _) in self._running.items() if group.future in unwanted]
            for number in numbers:
                self._running.pop(number)
        self._send(("cancel", numbers))

    def check_time(self) -> None:
        """Raise ``EpisodeError`` if an episode did not even end by its time limit."""
        limit = self._task.episode_seconds
        with self._lock:
            latest = time.monotonic() - limit - GRACE_SECONDS
            begun = [number for number, since in self._begun.items() if since < latest]
            late = {self._running[number][0].name for number in begun if number in self._running}
        if late:
            self.kill()
            raise EpisodeError(
                f"the environment '{self._task.name}' kept its process busy and did not end at task.episode_seconds "
                f"({limit:g} s); await what takes long{_names(late)}\nlog of the environment: {self.log}"
            )

    def close(self) -> None:
        """Kill the process and its children. Safe to call twice."""
        self.kill()
        self._reader.join()
        super().close()

    def _send(self, message: tuple[Any, ...]) -> bool:
        with self._sending, contextlib.suppress(OSError):
            self.connection.send(message)
            return True
        return False

    def _read(self) -> None:
        """Serve the child's messages until it is gone."""
        take: dict[str, Callable[..., None]] = {
            "begun": self._begin,
            "sample": self._sample,
            "played": self._played,
            "failed": self._failed,
        }
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, *values = self.connection.recv()
                take[kind](*values)
        with self._lock:
            groups = [group for group, _ in self._running.values()]
        for group in groups:
            self._fail(group, self._death())

    def _begin(self, number: int) -> None:
        self._begun[number] = time.monotonic()

    def _sample(self, request: int, number: int, ids: np.ndarray, turn: int, most: int) -> None:
        """Ask an engine for a turn, and send what it answers."""
        found = self._running.get(number)
        if found is None:
            return
        group, index = found
        sampling = Sampling(1, group.sampling.temperature, group.sampling.top_p, most)
        future = group.ask(ids, seed_from(group.seed, index, turn), sampling)
        future.add_done_callback(partial(self._answer, request))

    def _answer(self, request: int, future: "Future[Completion]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        self._send(("drawn", request, future.result() if error is None else error))

    def _finished(self, number: int) -> tuple[_Group, int] | None:
        self._begun.pop(number, None)
        return self._running.pop(number, None)

    def _played(self, number: int, played: Played) -> None:
        found = self._finished(number)
        if found is None:
            return
        group, index = found
        group.results[index] = played
        results = [one for one in group.results if one is not None]
        if len(results) == len(group.results) and not group.future.done():
            group.future.set_result(results)

    def _failed(self, number: int, error: MegarlError) -> None:
        found = self._finished(number)
        if found is not None:
            error.args = (f"{error}\nlog of the environment: {self.log}",)
            self._fail(found[0], error)

    def _fail(self, group: _Group, error: MegarlError) -> None:
        with self._lock:
            for number in group.numbers:
                self._running.pop(number, None)
            if not group.future.done():
                group.future.set_exception(error)

    def _death(self) -> EpisodeError:
        with self._lock:
            names = {group.name for group, _ in self._running.values()}
        return EpisodeError(
            f"the environment's process {self.status()}{_names(names)}\nlog of the environment: {self.log}"
        )


def _names(names: Iterable[str]) -> str:
    """Return the prompts whose episodes were being played, for a message."""
    listed = first_few([f"prompt '{name}'" for name in sorted(names)])
    return f"; being played were episodes of\n{listed}" if listed else ""
