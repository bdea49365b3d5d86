# SPDX-License-Identifier: Apache-2.0
"""Play episodes in a process of their own; the turns are drawn by whoever started it.

Messages from the parent: ``("play", number, prompt, ids, limits)``, ``("drawn", request, completion or error)``,
``("cancel", numbers)``. Messages to it: ``("begun", number)``, ``("sample", request, number, ids, turn, most tokens)``,
``("played", number, result)``, ``("failed", number, error)``. Numbers are those of episodes.
"""

import asyncio
import itertools
import threading
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from megarl.controller.rollouts.child import portable, run_child
from megarl.environments.base import Environment
from megarl.environments.client import Client, Limits
from megarl.environments.episode import Player
from megarl.errors import EpisodeError, MegarlError
from megarl.tasks import TaskContext, build_task
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.tokenizer import load_tokenizer
from megarl.types import Completion, Prompt


class Worker:
    """Plays what its connection asks for, all episodes in one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: dict[int, asyncio.Future[Completion]] = {}
        self._numbers = itertools.count()
        self._episodes: dict[int, asyncio.Task] = {}
        self._failure: MegarlError | None = None

    async def run(self) -> None:
        """Serve until the other end of the connection is closed."""
        context, model = self._connection.recv()
        try:
            self._load(context, model)
        except MegarlError as error:
            self._failure = error
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._take, *self._connection.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def _load(self, context: TaskContext, model: str) -> None:
        config = context.config
        verdicts = Verdicts(f"environment '{config.name}'", config.reward_weights)
        environment = cast(Environment, build_task(context))
        self._player = Player(environment, config.name, verdicts, config.reward_errors == "zero")
        self._template = config.chat_template_kwargs
        self._tokenizer = load_tokenizer(model)

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "play":
            number = values[0]
            self._episodes[number] = asyncio.ensure_future(self._play(*values))
            self._episodes[number].add_done_callback(lambda _: self._episodes.pop(number))
        elif kind == "drawn":
            self._give(*values)
        else:
            for number in values[0]:
                if number in self._episodes:
                    self._episodes[number].cancel()

    def _give(self, request: int, answer: Any) -> None:
        """Hand an answer to the episode that waits for it, if it still does."""
        future = self._requests.pop(request, None)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def _play(self, number: int, prompt: Prompt, ids: np.ndarray, limits: Limits) -> None:
        async def draw(sent: np.ndarray, turn: int, most: int) -> Completion:
            request = next(self._numbers)
            future = self._requests[request] = asyncio.get_running_loop().create_future()
            self._connection.send(("sample", request, number, sent, turn, most))
            try:
                return await future
            finally:
                self._requests.pop(request, None)

        try:
            if self._failure is not None:
                raise self._failure
            self._connection.send(("begun", number))
            client = Client(ids, self._tokenizer, limits, draw, self._template)
            self._connection.send(("played", number, await self._player.play(prompt, client)))
        except Exception as error:
            if not isinstance(error, MegarlError):
                error = EpisodeError(f"prompt '{prompt.id}': {type(error).__name__}: {error}")
            self._connection.send(("failed", number, portable(error)))


def serve(connection: Connection) -> None:
    """Play episodes until the connection is closed."""
    asyncio.run(Worker(connection).run())


if __name__ == "__main__":
    run_child(serve)
