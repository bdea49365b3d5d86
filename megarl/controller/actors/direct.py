# SPDX-License-Identifier: Apache-2.0
"""Call an actor over a connection of its own, for calls that must not take Ray's milliseconds: those of a sync.

What these calls raise is what the same calls raise through Ray, and participants must give signs of life meanwhile.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from multiprocessing.connection import Connection
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import ray

from megarl.checkpoint_engine.transports.hello import accept, as_pipe, new_token, reach
from megarl.controller.actors.calls import LOOK_SECONDS, Limit, wait_all, with_note
from megarl.controller.actors.pulse import Watch
from megarl.errors import LostError, MegarlError, WorkerError
from megarl.futures.answering import Answering, answer_in_order
from megarl.futures.lines import DirectCall, DirectLine, fail
from megarl.network import LOOPBACK, listen

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="AnswersInOrder")

# Seconds in which an actor is connected, and in which Ray tells that one is dead.
CONNECT_SECONDS, DEATH_SECONDS = 60.0, 5.0
# The only number that says hello to an actor.
CONTROLLER = 0


class Place(NamedTuple):
    """The place at which an actor listens for its controller.

    Attributes:
        host, port: of the listener.
        token: what the controller says first.
    """

    host: str
    port: int
    token: str


def open_place(caller: str, take: Callable[[Connection], object]) -> Place:
    """In an actor: listen for the controller, once.

    Args:
        caller: address of the controller's node.
        take: gets the connection, in a thread of its own.
    """
    here, token = ray.util.get_node_ip_address(), new_token()
    host = LOOPBACK if here == caller else here
    listener = listen(host)

    def wait() -> None:
        with listener:
            try:
                _, peer = accept(listener, token, [CONTROLLER], time.monotonic() + CONNECT_SECONDS)
            except OSError:  # the controller has not come
                return
        take(as_pipe(peer))

    threading.Thread(target=wait, daemon=True).start()
    return Place(host, listener.getsockname()[1], token)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method of an ``AnswersInOrder`` wait until no other such method runs."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.turn:
            return method(self, *args, **kwargs)

    return call


class AnswersInOrder:
    """Base of an actor whose methods can also be called over a connection, one after another.

    They run beside those that are called through Ray. ``in_turn`` is for those that must not.

    Attributes:
        turn: held while a method runs that is ``in_turn``.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()

    def open_place(self, caller: str) -> Place:
        """See ``open_place``."""

        def value(method: str, arguments: tuple) -> Any:
            idle = f"ray::{type(self).__name__}"
            # The process's title tells what it runs, as with calls that Ray brings.
            with ray._private.worker._changeproctitle(f"{idle}.{method}", idle):
                return getattr(self, method)(*arguments)

        return open_place(caller, partial(answer_in_order, value=value))


class AnswersTogether:
    """Base of an asynchronous actor whose methods can also be called over a connection, side by side.

    Args:
        on_gpu: True if a sync may stay awake for its next call.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._answering = Answering(self._value, lambda: None)
        self._answering.on_gpu = on_gpu

    async def open_place(self, caller: str) -> Place:
        """See ``open_place``."""
        loop, answering = asyncio.get_running_loop(), self._answering
        return open_place(caller, lambda pipe: loop.call_soon_threadsafe(answering.take_from, pipe))

    async def _value(self, method: str, arguments: tuple) -> Any:
        return await getattr(self, method)(*arguments)


class DirectActor:
    """The connection to whichever actor has a name at present; made with the first call to it. Used from one thread.

    Args:
        name: the participant's name.
        watch: tells which participants are alive and where their logs are.
        watched: those that must give signs of life during a call; default: the participant.
    """

    def __init__(self, name: str, watch: Watch, watched: Sequence[str] = ()) -> None:
        self.name, self.watch, self.watched = name, watch, watched or [name]
        self._line: _WatchedLine | None = None

    def call(self, actor: Any, method: str, *arguments: Any) -> DirectCall:
        """Call a method of an actor that has ``open_place``. The future raises what ``wait_all`` raises.

        Raises:
            MegarlError: it cannot be reached.
        """
        if self._line is not None:
            self._line.read()  # it may have ended since
            if self._line.ended or self._line.actor is not actor:
                self._line.pipe.close()
                self._line = None
        self._line = self._line or self._connected(actor)
        return self._line.call(method, *arguments)

    def _connected(self, actor: Any) -> "_WatchedLine":
        limit = Limit("the time to connect", CONNECT_SECONDS)
        call = {self.name: actor.open_place.remote(ray.util.get_node_ip_address())}
        [place] = wait_all(call, self.watch, limit, watched=self.watched)
        try:
            pipe = as_pipe(reach(place.host, place.port, place.token, CONTROLLER, CONNECT_SECONDS))
        except OSError as error:
            raise WorkerError(
                f"{self.name} cannot be reached at {place.host}:{place.port}: {error}; the nodes of a run must reach "
                "each other on all ports"
            ) from error
        return _WatchedLine(pipe, self, actor)


class _WatchedLine(DirectLine):
    """A line to an actor."""

    def __init__(self, pipe: Connection, owner: DirectActor, actor: Any) -> None:
        super().__init__(pipe, self._why_gone)
        self.owner, self.actor = owner, actor

    def call(self, method: str, *arguments: Any) -> "_WatchedCall":
        """See ``lines.DirectLine``."""
        return self._send(_WatchedCall(self), method, arguments)

    def _why_gone(self) -> Exception:
        """Return why the actor has closed its connection, as Ray tells it."""
        name, watch = self.owner.name, self.owner.watch
        try:
            wait_all({name: self.actor.ping.remote()}, watch, Limit("the time of a ping", DEATH_SECONDS))
        except MegarlError as error:
            return error
        return LostError.of([name], f"{name} has closed its connection")


class _WatchedCall(DirectCall):
    """A call that also fails when one that is watched gives no sign of life."""

    def __init__(self, line: _WatchedLine) -> None:
        super().__init__(line)
        self._owner, self._checked = line.owner, time.monotonic()

    def look(self) -> None:
        """See ``futures.ReadByWaiter``."""
        super().look()
        if not self.done() and time.monotonic() >= self._checked + LOOK_SECONDS:
            self._checked = time.monotonic()
            try:
                self._owner.watch.check(self._owner.watched)
            except MegarlError as error:
                fail(self, error)

    def set_exception(self, exception: BaseException | None) -> None:
        """Say in an error of the participant who it is, if the error does not, and where its log is."""
        name = self._owner.name
        if type(exception) is WorkerError and name not in str(exception):
            exception.args = (f"{name}: {exception}",)
        if isinstance(exception, MegarlError) and not (
            isinstance(exception, LostError) and name not in exception.names
        ):
            exception = with_note(exception, self._owner.watch.log_note(name))
        super().set_exception(exception)
