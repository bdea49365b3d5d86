# SPDX-License-Identifier: Apache-2.0
"""Run rewards in a separate process, so that user code which hangs, exits or crashes becomes an error."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megarl.controller.rollouts.child import Child, portable, run_child
from megarl.controller.rollouts.rewarding.attempt import Attempt, Running, Spot
from megarl.controller.rollouts.rewarding.scoring import Group, Scorer
from megarl.errors import MegarlError, RewardError, first_few
from megarl.tasks import Task, TaskContext, build_task
from megarl.tasks.base import NOTHING, Reward
from megarl.tasks.rewards.forms import form_of_task
from megarl.types import DecodedCompletion, Prompt

POLL_SECONDS = 0.2
# Right for no task, and in no format that a reward could ask for.
DRY_RESPONSE = "This is plain text."


class RewardProcess(Child):
    """Scores completions in a child process, which lives until the end of the run and keeps any state of the reward."""

    def __init__(self, context: TaskContext, log: Path) -> None:
        """Start the process, which loads the task in the background.

        Args:
            context: the task's context; ``reward_threads`` and ``reward_seconds`` are used.
            log: file of the process's output.
        """
        super().__init__(__name__, log)
        self._context, task = context, context.config
        self._limit, self._retries, self._zero = task.reward_seconds, task.reward_retries, task.reward_errors == "zero"
        # An asynchronous run scores groups in a thread while the main one evaluates.
        self._scoring, self._closed = threading.Lock(), False
        self.connection.send(context)

    def score(
        self, groups: Sequence[Group], look: Callable[[], None] = lambda: None, once: bool = False
    ) -> list[Reward]:
        """Reward every completion, in the order given. Any thread may call it; one at a time scores.

        Args:
            groups: pairs of a prompt and its completions.
            look: called every ``POLL_SECONDS`` while waiting; if it raises, the wait ends.
            once: call the reward a single time: with the first completion, or the first group if it takes groups. An
                error of that call is raised in any case.

        Raises:
            RewardError: a reward raised, exited, crashed, exceeded ``task.reward_seconds``, or is not a finite number,
                and did so again ``task.reward_retries`` times. The message names the prompt and the log. With
                ``task.reward_errors: zero`` its completions get ``NOTHING`` instead.
        """
        while not self._scoring.acquire(timeout=POLL_SECONDS):
            look()
        try:
            return self._score(groups, look, once)
        finally:
            self._scoring.release()

    def _score(self, groups: Sequence[Group], look: Callable[[], None], once: bool) -> list[Reward]:
        results: dict[Spot, Reward] = {}
        failures: Counter[Spot] = Counter()
        spots = [(index, number) for index, (_, each) in enumerate(groups) for number in range(len(each))]
        while left := [spot for spot in spots if spot not in results]:
            attempt = Attempt(groups, left)
            self._run(attempt, look, once)
            results |= attempt.results
            for spot, error in attempt.failed.items():
                failures[spot] += 1
                if failures[spot] > self._retries:
                    if not self._zero:
                        raise self._with_log(error)
                    results[spot] = NOTHING
            if once:
                break
        return [results[spot] for spot in spots if spot in results]

    def _run(self, attempt: Attempt, look: Callable[[], None], once: bool) -> None:
        """Score what an attempt asks for. If the process hangs or dies, what it was doing has failed."""
        tolerant = not once and (self._zero or self._retries > 0)
        try:
            self.connection.send((attempt.batch, once, tolerant))
            self._collect(attempt, look)
            return
        except _Stuck as error:
            late, how = error.late, f"a reward took longer than task.reward_seconds ({self._limit:g} s)"
        except (EOFError, OSError):
            late, how = attempt.running, f"the reward process {self.status()}"
        named = RewardError(f"{how}{_names(late)}")
        if not tolerant or not late:
            raise self._with_log(named)
        for place in list(late):
            attempt.fail(place, named)
        self._restart()

    def _collect(self, attempt: Attempt, look: Callable[[], None]) -> None:
        """Take the child's messages until the attempt is done."""
        take: dict[str, Callable[..., None]] = {"begin": attempt.begin, "end": attempt.end, "failed": attempt.fail}
        looked = time.monotonic()
        while True:
            came = self.connection.poll(POLL_SECONDS)
            if not came or time.monotonic() - looked > POLL_SECONDS:
                if late := attempt.late(self._limit):
                    raise _Stuck(late)
                try:
                    look()
                except MegarlError:  # a later batch must not get the answers of this one
                    self._restart()
                    raise
                looked = time.monotonic()
            if not came:
                continue
            kind, *values = self.connection.recv()
            if kind == "error":
                raise self._with_log(values[0])
            if kind == "done":
                return
            take[kind](*values)

    def dry_run(self, prompt: Prompt, ids: Sequence[int] = (), group: int = 2) -> Reward:
        """Call the reward once, with responses of plain text, and check that it gives a value; return that.

        Args:
            prompt: the prompt.
            ids: the tokens of ``DRY_RESPONSE``.
            group: number of completions that a reward of whole groups is given; other rewards are given one.

        Raises:
            RewardError: see ``score``; the message ends with the reward's own traceback.
            MegarlError: the task or its reward cannot be loaded.
        """
        try:
            completion = DecodedCompletion(DRY_RESPONSE, "stop", np.array(ids, dtype=np.int64))
            return self.score([(prompt, [completion] * group)], once=True)[0]
        except RewardError as error:
            trace = getattr(error, "traceback_text", "")
            raise RewardError(f"dry run of the reward (task.reward_dry_run): {error}\n{trace}".rstrip()) from error

    def close(self) -> None:
        """Kill the process for good. Safe to call twice."""
        self._closed = True
        super().close()

    def _restart(self) -> None:
        """Replace the process by one that loads the reward anew, unless it was closed."""
        if self._closed:
            raise RewardError("the run has ended, and with it its reward process")
        super().close()
        super().__init__(__name__, self.log)
        self.connection.send(self._context)

    def _with_log(self, error: MegarlError) -> MegarlError:
        error.args = (f"{error}\nlog of the rewards: {self.log}",) if isinstance(error, RewardError) else error.args
        return error


class _Stuck(Exception):
    """Calls have exceeded their time."""

    def __init__(self, late: Running) -> None:
        super().__init__()
        self.late = late


def _names(running: Running) -> str:
    """Return the prompts whose rewards were being computed, for a message."""
    names = sorted({name for name, _ in running.values()})
    listed = first_few([f"prompt '{name}'" for name in names])
    return f"; being scored were completions of\n{listed}" if names else ""


class _Guarded:
    """Wraps a task: turns whatever its reward raises, ``sys.exit`` included, into an error that names the prompt."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.reward_form = form_of_task(task)

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Prompt:
        return self._task[index]

    def reward(self, prompt: Prompt, given: Any) -> Any:
        if self.reward_form.is_async:
            return self._reward_later(prompt, given)
        with self._guarded(prompt):
            return self._task.reward(prompt, given)

    async def _reward_later(self, prompt: Prompt, given: Any) -> Any:
        task: Any = self._task
        with self._guarded(prompt):
            return await task.reward(prompt, given)

    @contextlib.contextmanager
    def _guarded(self, prompt: Prompt) -> Iterator[None]:
        try:
            yield
        except (MegarlError, asyncio.CancelledError):
            raise
        except SystemExit as error:
            raise RewardError(f"prompt '{prompt.id}': the reward called sys.exit({error.code!r})") from error
        except BaseException as error:
            raise RewardError(f"prompt '{prompt.id}': the reward raised {type(error).__name__}: {error}") from error


def serve(connection: Connection) -> None:
    """Score what the connection delivers, until the other end is closed."""
    lock = threading.Lock()

    def send(message: tuple) -> None:
        with lock:
            connection.send(message)

    context = connection.recv()
    failure: MegarlError | None = None
    try:
        scorer = Scorer(_Guarded(build_task(context)), context.config.reward_threads)
    except MegarlError as error:
        failure = error

    def report(message: tuple) -> None:
        send((*message[:2], portable(message[2])) if message[0] == "failed" else message)

    while True:
        groups, once, tolerant = connection.recv()
        try:
            if failure is not None:
                raise failure
            scorer.score(groups, once, report, tolerant)
            send(("done",))
        except MegarlError as error:
            send(("error", portable(error)))


if __name__ == "__main__":
    run_child(serve)
