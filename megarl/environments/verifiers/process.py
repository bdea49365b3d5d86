# SPDX-License-Identifier: Apache-2.0
"""Drive the process that plays environments of verifiers, from the side of megarl."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, EpisodeError

RUNNER = Path(__file__).with_name("runner.py")
KEY = "MEGARL_API_KEY"
# An episode that was cancelled must end within so many seconds.
GRACE_SECONDS = 10.0
# Variables of this Python, which are not for the other one.
OWN = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


@dataclass(frozen=True)
class Place:
    """The interpreter of the process, and what it is told at its start.

    Attributes:
        python: the interpreter.
        folder: where modules are looked up beside what is installed there, or None.
        env: verifiers' own configuration of the environment.
        turns: most turns of the agent, if ``env`` does not say.
        size: number of rows, or None for all.
        seconds: limit of the start.
    """

    python: Path
    folder: Path | None
    env: Mapping[str, Any]
    turns: int
    size: int | None
    seconds: float

    def start(self, key: str, output: Any = None) -> tuple[subprocess.Popen, socket.socket]:
        """Start the process, and send it its first frame.

        Args:
            key: token of the endpoint.
            output: file of its output; None: this process's own.
        """
        ours, theirs = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name not in OWN}
        environ |= {"PATH": f"{self.python.parent}{os.pathsep}{environ.get('PATH', '')}", KEY: key}
        environ |= {"PYTHONPATH": str(self.folder)} if self.folder is not None else {}
        command = [str(self.python), "-P", str(RUNNER), str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, pass_fds=[theirs.fileno()]
            )
        except OSError as error:
            raise ConfigError(f"task.options.python is '{self.python}', which cannot be started: {error}") from error
        finally:
            theirs.close()
        ours.settimeout(self.seconds)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which the first read tells
            ours.sendall(frame_of({"env": self.env, "turns": self.turns, "size": self.size}))
        return process, ours

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the environment: messages, data and key of each.

        Raises:
            ConfigError: the interpreter, verifiers or the environment cannot be loaded.
        """
        with tempfile.TemporaryFile() as output:
            process, link = self.start("", output)
            try:
                return self.read_rows(link)
            except (OSError, EOFError) as error:
                output.seek(0)
                tail = output.read()[-2000:].decode(errors="replace").strip()
                slow = f"it took longer than task.options.start_seconds ({self.seconds:g} s)"
                why = slow if isinstance(error, TimeoutError) else "it ended early"
                raise ConfigError(f"the environment of verifiers cannot be loaded: {why}\n{tail}".rstrip()) from error
            finally:
                link.close()
                process.kill()
                process.wait()

    def read_rows(self, link: socket.socket) -> list[dict[str, Any]]:
        """Return what the process answers to its first frame; see ``rows``. It may also raise OSError and EOFError."""
        answer = json.loads(_exactly(link, int.from_bytes(_exactly(link, 8), "big")))
        if "error" not in answer:
            return answer["rows"]
        said = answer["error"]
        if said.startswith("ModuleNotFoundError: No module named 'verifiers"):
            said += f"; install it there: {self.python} -m pip install verifiers==0.4.0"
        raise ConfigError(f"the environment of verifiers {dict(self.env)} cannot be loaded by {self.python}: {said}")


class Runner:
    """A running process, and the episodes that it plays.

    Attributes:
        ended: True if it plays no more.
        failure: why it was killed, or None.
    """

    def __init__(self, process: subprocess.Popen, link: socket.socket) -> None:
        """
        Args:
            process, link: as ``Place.start`` returned them, after ``Place.read_rows``.
        """
        self._process, self._link = process, link
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self.ended = False
        self.failure: EpisodeError | None = None

    async def open(self) -> None:
        """Begin to read what the process sends."""
        self._link.setblocking(False)
        self._stream, self._writer = await asyncio.open_connection(sock=self._link)
        self._reading = asyncio.ensure_future(self._read())

    async def play(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode, and return what it has earned; see ``runner.py``.

        Raises:
            EpisodeError: the process has ended.
        """
        if self.ended:
            raise self.failure or EpisodeError("the process of verifiers has ended")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame_of({"play": number, **frame}))
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._writer.write(frame_of({"cancel": number}))
            future.add_done_callback(lambda ended: ended.exception())  # nobody waits for it any more
            watch = asyncio.ensure_future(self._ends(future))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
            raise

    async def _ends(self, future: "asyncio.Future[dict[str, Any]]") -> None:
        """Kill the process if a cancelled episode does not end: its code keeps all others waiting."""
        done, _ = await asyncio.wait([future], timeout=GRACE_SECONDS)
        if not done:
            self.failure = EpisodeError(
                f"an environment of verifiers kept its process busy: an episode did not end {GRACE_SECONDS:g} s after "
                "task.episode_seconds; await what takes long"
            )
            self.ended = True
            self._process.kill()

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await self._stream.readexactly(8), "big")
                frame = json.loads(await self._stream.readexactly(length))
                future = self._waiting.pop(frame.pop("played"), None)
                if future is not None and not future.done():
                    future.set_result(frame)
        self.ended = True
        self._process.kill()
        status = self._process.wait()
        said = f"the process of verifiers ended with status {status}; its output is in the log of the environment"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self.failure or EpisodeError(said))


def frame_of(value: Mapping[str, Any]) -> bytes:
    """Return a frame; see ``runner.py``."""
    body = json.dumps(value).encode()
    return len(body).to_bytes(8, "big") + body


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = link.recv(min(count - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
