# SPDX-License-Identifier: Apache-2.0
"""Run rewards in a separate process, so that user code which hangs, exits or crashes becomes an error."""

import asyncio
import contextlib
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megarl.controller.rollouts.child import Child, run_child
from megarl.controller.rollouts.scoring import Group, Scorer
from megarl.errors import MegarlError, RewardError, first_few
from megarl.tasks import Task, TaskContext, build_task
from megarl.tasks.base import Reward
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
        self._limit = context.config.reward_seconds
        self.connection.send(context)

    def score(
        self, groups: Sequence[Group], look: Callable[[], None] = lambda: None, once: bool = False
    ) -> list[Reward]:
        """Reward every completion, in the order given.

        Args:
            groups: pairs of a prompt and its completions.
            look: called every ``POLL_SECONDS`` while waiting; if it raises, the wait ends.
            once: call the reward a single time: with the first completion, or the first group if it takes groups.

        Raises:
            RewardError: a reward raised, exited, crashed, exceeded ``task.reward_seconds``, or is not a finite number.
                The message names the prompt and the log.
        """
        running: dict[int, tuple[str, float]] = {}
        try:
            self.connection.send((list(groups), once))
            while True:
                if not self.connection.poll(POLL_SECONDS):
                    self._check_time(running)
                    look()
                    continue
                kind, *values = self.connection.recv()
                if kind == "begin":
                    running[values[0]] = (values[1], time.monotonic())
                elif kind == "end":
                    running.pop(values[0])
                elif kind == "error":
                    raise values[0]
                else:
                    return values[0]
        except (EOFError, OSError) as error:
            raise RewardError(f"the reward process {self.status()}{_names(running)}{self._log_note()}") from error
        except MegarlError as error:
            error.args = (f"{error}{self._log_note()}",) if isinstance(error, RewardError) else error.args
            raise

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

    def _check_time(self, running: dict[int, tuple[str, float]]) -> None:
        now = time.monotonic()
        late = {key: (name, began) for key, (name, began) in running.items() if now - began > self._limit}
        if late:
            raise RewardError(f"a reward took longer than task.reward_seconds ({self._limit:g} s){_names(late)}")

    def _log_note(self) -> str:
        return f"\nlog of the rewards: {self.log}"


def _names(running: dict[int, tuple[str, float]]) -> str:
    """Return the prompts whose rewards were being computed, for a message."""
    names = sorted({name for name, _ in running.values()})
    listed = first_few([f"prompt '{name}'" for name in names])
    return f"; being scored were completions of\n{listed}" if names else ""


class _Reported:
    """Wraps a task: reports when a reward begins and ends, and turns ``sys.exit`` into an error."""

    def __init__(self, task: Task, send: Callable[[tuple], None]) -> None:
        self._task, self._send, self._keys = task, send, itertools.count()
        self.reward_form = form_of_task(task)

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Prompt:
        return self._task[index]

    def reward(self, prompt: Prompt, given: Any) -> Any:
        if self.reward_form.is_async:
            return self._reward_later(prompt, given)
        with self._reported(prompt):
            return self._task.reward(prompt, given)

    async def _reward_later(self, prompt: Prompt, given: Any) -> Any:
        task: Any = self._task
        with self._reported(prompt):
            return await task.reward(prompt, given)

    @contextlib.contextmanager
    def _reported(self, prompt: Prompt) -> Iterator[None]:
        key = next(self._keys)
        self._send(("begin", key, prompt.id))
        try:
            yield
        except (MegarlError, asyncio.CancelledError):
            raise
        except SystemExit as error:
            raise RewardError(f"prompt '{prompt.id}': the reward called sys.exit({error.code!r})") from error
        except BaseException as error:
            raise RewardError(f"prompt '{prompt.id}': the reward raised {type(error).__name__}: {error}") from error
        finally:
            self._send(("end", key))


def serve(connection: Connection) -> None:
    """Score what the connection delivers, until the other end is closed."""
    lock = threading.Lock()

    def send(message: tuple) -> None:
        with lock:
            connection.send(message)

    context = connection.recv()
    failure: MegarlError | None = None
    try:
        scorer = Scorer(_Reported(build_task(context), send), context.config.reward_threads)
    except MegarlError as error:
        failure = error
    while True:
        groups, once = connection.recv()
        try:
            if failure is not None:
                raise failure
            send(("rewards", scorer.score(groups, once)))
        except MegarlError as error:
            if error.__cause__ is not None:
                sys.excepthook(type(error), error, error.__traceback__)
                # Pickled with the error's attributes; tracebacks themselves are not.
                vars(error)["traceback_text"] = "".join(traceback.format_exception(error.__cause__))
            send(("error", error))


if __name__ == "__main__":
    run_child(serve)
