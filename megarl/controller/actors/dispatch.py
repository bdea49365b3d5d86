# SPDX-License-Identifier: Apache-2.0
"""Send requests to whichever engine has the least to do, and again to another one if that engine is lost.

A request says all that its answer depends on (prompt, seed, version), so that it does not matter which engine answers
it, or how often it was asked before.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.controller.actors.calls import named_error
from megarl.controller.actors.engine_handle import EngineHandle
from megarl.controller.actors.pulse import Watch
from megarl.errors import LostError, StaleVersionError, WeightSyncError, WorkerError

# Seconds between two checks of limits and signs of life.
LOOK_SECONDS = 0.5


class Home:
    """The place where all turns of a prompt's episodes are drawn, so that they share a cache of prefixes.

    Attributes:
        engine: the engine; None before the first turn.
    """

    engine: EngineHandle | None = None


@dataclass(eq=False)
class Request:
    """A call that any engine can answer.

    Attributes:
        number: of the request, in the order of submission.
        method, arguments: of the engine's actor.
        weight: sequences that it makes an engine decode.
        home: the engine that it goes to if that is open; or None.
        future: takes the answer.
        opened: the engine's ``opened`` when it was sent.
        since: when it was sent, monotonic seconds.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    weight: int
    home: Home | None
    future: "Future[Any]" = field(default_factory=Future)
    opened: int = 0
    since: float = 0.0


class Dispatcher:
    """Holds the requests to all engines. Any thread may submit; one thread of its own takes the answers.

    Attributes:
        on_lost: called in any thread with an engine that is lost, and why. Whoever starts it again calls ``open``;
            default: every request fails.
    """

    def __init__(self, engines: Sequence[EngineHandle], watch: Watch, seconds: float, room: int) -> None:
        """
        Args:
            engines: the engines, all of them open.
            watch: tells which of them give signs of life.
            seconds: ``sampler.generate_seconds``.
            room: sequences that an engine gets at most while there are other engines; more wait here.
        """
        self.on_lost: Callable[[EngineHandle, WorkerError], None] = lambda engine, error: self.fail(error)
        self._engines, self._watch, self._seconds = list(engines), watch, seconds
        self._room = room if len(self._engines) > 1 else float("inf")
        self._lock = threading.RLock()
        self._queue: list[Request] = []
        self._running: dict[EngineHandle, dict[Any, Request]] = {engine: {} for engine in self._engines}
        self._homes: dict[EngineHandle, weakref.WeakSet[Home]] = {engine: weakref.WeakSet() for engine in self._engines}
        self._count = self._again = 0
        self._failure: WorkerError | None = None
        self._answers: SimpleQueue[tuple[EngineHandle, Any, Future[Any]]] = SimpleQueue()
        self._end = threading.Event()
        threading.Thread(target=self._run, name="dispatcher", daemon=True).start()

    def submit(self, method: str, *arguments: Any, weight: int = 1, home: Home | None = None) -> "Future[Any]":
        """Send a request when an engine has room; see ``Request``. The future raises what the engine raised.

        An engine that died or fails is lost, and the request goes to another one.
        """
        with self._lock:
            self._count += 1
            request = Request(self._count, method, arguments, weight, home)
            if self._failure is not None:
                request.future.set_exception(self._failure)
            else:
                self._queue.append(request)
                self._send()
        return request.future

    def cancel(self, futures: "Iterable[Future[Any]]") -> None:
        """Cancel requests that nobody waits for any more."""
        unwanted = set(futures)
        with self._lock:
            self._queue = [request for request in self._queue if request.future not in unwanted]
            for running in self._running.values():
                for reference in [one for one, request in running.items() if request.future in unwanted]:
                    del running[reference]
                    ray.cancel(reference)
            self._send()
        for future in unwanted:
            future.cancel()

    def lose(self, engine: EngineHandle, error: WorkerError) -> None:
        """Send the engine's requests to the others; nothing if it is lost already."""
        with self._lock:
            if engine.lost is not None:
                return
            engine.lost = str(error)
            self._take_back(engine, list(self._running[engine]))
            self._send()
        self.on_lost(engine, error)

    def open(self, engine: EngineHandle) -> None:
        """Send requests to an engine from now on: it holds the version that is to be sampled from."""
        with self._lock:
            engine.lost, engine.closed = None, False
            engine.opened += 1
            self._send()

    def fail(self, error: WorkerError) -> None:
        """Let every request fail, those of the future too: no engine will answer them."""
        with self._lock:
            self._failure = error
            left = [*self._queue, *(request for running in self._running.values() for request in running.values())]
            self._queue = []
            for running in self._running.values():
                running.clear()
        for request in left:
            _settle(request, error)

    def check(self) -> None:
        """Raise the error that ``fail`` was given."""
        if self._failure is not None:
            raise self._failure

    def sent_again(self) -> int:
        """Return how many requests were sent again since the last call."""
        with self._lock:
            again, self._again = self._again, 0
        return again

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()

    def _send(self) -> None:
        """Send what can be sent; the lock is held."""
        left = []
        for request in self._queue:
            engine = self._engine_for(request)
            if engine is None:
                left.append(request)
            else:
                self._send_to(engine, request)
        self._queue = left

    def _engine_for(self, request: Request) -> EngineHandle | None:
        """Return the engine that a request goes to now; None if it has to wait."""
        usable = [engine for engine in self._engines if engine.lost is None and not engine.closed]
        if request.home is not None:
            if request.home.engine not in usable and usable:
                engine = min(usable, key=lambda one: (len(self._homes[one]), self._load(one)))
                request.home.engine = engine
                self._homes[engine].add(request.home)
            return request.home.engine if usable else None
        if not usable:
            return None
        load, idlest = min(((self._load(one), one) for one in usable), key=lambda pair: pair[0])
        return idlest if not load or load + request.weight <= self._room else None

    def _load(self, engine: EngineHandle) -> int:
        return sum(request.weight for request in self._running[engine].values())

    def _send_to(self, engine: EngineHandle, request: Request) -> None:
        request.opened, request.since = engine.opened, time.monotonic()
        reference = getattr(engine.actor, request.method).remote(*request.arguments)
        self._running[engine][reference] = request
        reference.future().add_done_callback(lambda answer: self._answers.put((engine, reference, answer)))

    def _take_back(self, engine: EngineHandle, references: Sequence[Any]) -> None:
        """Queue requests again, in the order in which they came; the lock is held."""
        back = [self._running[engine].pop(reference) for reference in references]
        self._again += len(back)
        self._queue = sorted([*self._queue, *back], key=lambda request: request.number)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._end.is_set():
            with suppress(Empty):
                self._take(*self._answers.get(timeout=LOOK_SECONDS))
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                self._look()

    def _take(self, engine: EngineHandle, reference: Any, answer: "Future[Any]") -> None:
        """Settle the request that an engine answered, or queue it again if another answer can be had."""
        error = answer.exception()
        if isinstance(error, RayError):
            error = named_error(error, engine.name, self._watch)
        with self._lock:
            request = self._running[engine].get(reference)
            if request is None:  # cancelled, or sent to another engine
                return
            if _is_refused(engine, request, error):
                engine.closed = engine.closed or engine.opened == request.opened
                self._take_back(engine, [reference])
                self._send()
                return
            if not isinstance(error, WorkerError):
                del self._running[engine][reference]
                self._send()
        if isinstance(error, WorkerError):
            self.lose(engine, error)
        else:
            _settle(request, answer.result() if error is None else error)

    def _look(self) -> None:
        """Lose engines that exceed the limit or give no sign of life."""
        try:
            self._watch.check_head()
        except WorkerError as error:
            self.fail(error)
        for engine in self._engines:
            if engine.lost is not None:
                continue
            try:
                self._watch.check([engine.name])
                with self._lock:
                    oldest = min((request.since for request in self._running[engine].values()), default=float("inf"))
                if time.monotonic() - oldest > self._seconds:
                    raise LostError.of(
                        [engine.name],
                        f"{engine.name} did not answer within sampler.generate_seconds ({self._seconds:g} s)"
                        f"{self._watch.log_note(engine.name)}",
                    )
            except WorkerError as error:
                self.lose(engine, error)


def _is_refused(engine: EngineHandle, request: Request, error: BaseException | None) -> bool:
    """Return True if an engine refused a request because a sync failed: it is readmitted, or the run ends."""
    in_between = engine.closed or engine.opened != request.opened
    return isinstance(error, WeightSyncError) or (isinstance(error, StaleVersionError) and in_between)


def _settle(request: Request, outcome: Any) -> None:
    with suppress(InvalidStateError):  # it was cancelled
        if isinstance(outcome, BaseException):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
