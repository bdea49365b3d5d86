# SPDX-License-Identifier: Apache-2.0
"""Sync weights in a torchrun job: every rank has the model, rank 0 also drives the engines. No Ray.

Rank 0 runs the ``CheckpointEngineManager``. What the manager asks of the trainer goes to all ranks over connections of
their own, and so do their answers: an error of any rank is seen at once, also while the others wait in a collective.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.checkpoint_engine.board import Board
from megarl.checkpoint_engine.choice import Sender, choose_transport
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.mixin import CheckpointEngineMixin
from megarl.checkpoint_engine.participants import Sink, gather
from megarl.checkpoint_engine.phases import SyncReport
from megarl.checkpoint_engine.senders import ask_receivers, joined_endpoint, joined_sent
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.config.load import parse_section
from megarl.errors import MegarlError, WeightSyncError
from megarl.futures import KeptThread, done, in_thread, wait_or_read

T = TypeVar("T")

# The other ranks wait this much longer than rank 0, whose error says more.
GRACE_SECONDS = 30.0
# Seconds between two looks of another rank at whether rank 0 has gone on.
LOOK_SECONDS = 0.05


class WeightSync:
    """Bring one model's weights to engines; a collective over the ranks of the default process group.

    Args:
        model: this rank's ``MegatronModel``.
        engines: on rank 0 each ``SamplerProcess``; elsewhere none.
        config: the ``checkpoint_engine`` section. For ``transport: auto`` the engines are asked, at the first sync,
            where they compute.
    """

    def __init__(
        self,
        model: CheckpointEngineMixin,
        engines: Sequence[Sink] = (),
        config: CheckpointEngineConfig | dict[str, Any] | None = None,
    ) -> None:
        self._config = parse_section(CheckpointEngineConfig, "checkpoint_engine", config)
        self._model, self._engines = model, list(engines)
        self._board = Board(self._config.timeout_seconds)
        self._manager: CheckpointEngineManager | None = None
        # Of a rank other than 0: True if it sends, and its receivers may not be connected yet.
        self._connecting = False
        self._thread = _DeviceThread()

    @property
    def transport(self) -> str:
        """The transport's name; ``"auto"`` until rank 0 has chosen one, and on the other ranks."""
        return self._config.transport

    def sync(self, kind: Kind | None = None) -> SyncReport:
        """Bring the weights of the model's present version to every engine and make them current.

        Args:
            kind: ``"base"`` once before the first version (unless vLLM read the base from disk);
                ``checkpoint_engine.content``, the default, then, and after every update.

        Returns:
            The sync's report, on every rank.

        Raises:
            WeightSyncError: naming the participant, the phase and the cause; the same on every rank. No engine
                generates until it is readmitted.
        """
        content = kind or self._config.content
        return self._drive(lambda manager: manager.sync(self._model.policy_version(), content))

    def readmit(self, successors: Sequence[Sink] = ()) -> list[SyncReport]:
        """Bring back the engines that refuse since a sync failed: base and present version are sent to them anew.

        A base that they read from disk is not sent, see ``CheckpointEngineManager.readmit``.

        Args:
            successors: on rank 0, engines that were started in the place of dead ones, under their names.

        Returns:
            The reports of the syncs, on every rank; none if no engine refused.

        Raises:
            WeightSyncError: as ``sync``.
        """

        def act(manager: CheckpointEngineManager) -> list[SyncReport]:
            for engine in successors:
                manager.replace(engine, "its process was dead")
            return manager.readmit(self._model.policy_version())

        return self._drive(act)

    def close(self) -> None:
        """Disconnect from the engines on this rank; they keep what they have. A later sync connects again."""
        if self._manager is not None:
            self._manager.disconnect()
        self._model.finish_sync()

    def _drive(self, act: Callable[[CheckpointEngineManager], T]) -> T:
        """Let rank 0's manager act, and all other ranks do what it asks for; the result on every rank."""
        if dist.get_rank() != 0:
            return self._serve()
        outcome: Any = WeightSyncError("rank 0 left the sync")
        try:
            self._manager = self._manager or self._new_manager()
            outcome = act(self._manager)
            return outcome
        except MegarlError as error:
            outcome = error
            raise
        finally:
            self._board.tell(None, outcome)

    def _new_manager(self) -> CheckpointEngineManager:
        timeout, engines = self._config.timeout_seconds, self._engines
        source = _AllRanks(self._model, self._board, timeout)
        if self._config.transport == "auto" and engines:
            deadline = time.monotonic() + timeout
            [ranks] = gather({"trainer": source.places}, deadline, "start")
            receivers = ask_receivers(engines, ranks[0], deadline, "start")
            name, _ = choose_transport([rank.memory for rank in ranks], receivers)
            self._config = self._config.model_copy(update={"transport": name})
        return CheckpointEngineManager(source, engines, self._config)

    def _serve(self) -> Any:
        """Do what rank 0 asks for, until it says how the sync ended."""
        while True:
            method, arguments = self._board.next_call(self._config.timeout_seconds + GRACE_SECONDS)
            if method is None:
                [outcome] = arguments
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome
            try:
                outcome = self._act(method, partial(getattr(self._model, method), *arguments))
            except Exception as error:
                outcome = error if isinstance(error, MegarlError) else WeightSyncError(repr(error))
            self._board.answer(outcome)

    def _act(self, method: str, act: Callable[[], T]) -> T:
        """Do what rank 0 asks for.

        The first transfer over a new connection waits for receivers. One that is gone never comes, so the transfer is
        given up when rank 0 goes on without it.
        """
        if method != "send_weights" or not self._connecting:
            result = act()
            self._connecting = method == "prepare_sync" and result is not None
            return result
        sending = self._thread.start(act)
        while wait([sending], timeout=LOOK_SECONDS).not_done:
            if self._board.went_on():
                self._model.finish_sync()
                break
        result = sending.result()
        self._connecting = False
        return result


class _DeviceThread(KeptThread):
    """A kept thread whose work has the maker's current GPU: a thread begins with device 0."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Start ``work``; its result or exception as a future."""

        def on_device() -> T:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            return work()

        return super().start(on_device)


class _AllRanks:
    """The trainer as rank 0 sees it: the ``Source`` of its manager."""

    def __init__(self, model: CheckpointEngineMixin, board: Board, timeout: float) -> None:
        self._model, self._board, self._timeout = model, board, timeout
        self._thread = _DeviceThread()
        self._before: Future | None = None
        # How often the transport was opened or closed, and the number at which all receivers were connected.
        self._opened, self._connected = 0, -1

    def places(self) -> Future[list[Sender]]:
        """See ``checkpoint_engine.participants.Source``."""
        return done(lambda: [self._model.place()]) if self._board.alone else self._call("place", join=list)

    def prepare(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int]) -> Future[bytes]:
        """See ``checkpoint_engine.participants.Source``."""
        self._opened += 1
        join = partial(joined_endpoint, senders=senders)
        return self._call("prepare_sync", config, receivers, senders, join=join)

    def send(self, version: int, kind: Kind) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        opened = self._opened
        if self._connected == opened:
            # In this thread: to wake another, and to be woken by it, takes a tenth of a sync. Every receiver is
            # connected, so the transports notice the end of one.
            if self._board.alone:
                return done(partial(self._model.send_weights, version, kind))
            calls = self._begin("send_weights", version, kind)
            return done(lambda: joined_sent(self._answers("send_weights", calls)))

        def note(sent: Future) -> None:
            self._connected = opened if sent.exception() is None else -1

        sent = self._call("send_weights", version, kind, join=joined_sent)
        sent.add_done_callback(note)
        return sent

    def finish(self) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        self._opened += 1
        return self._call("finish_sync")

    def _call(self, method: str, *arguments: Any, join: Callable[[list], Any] = itemgetter(0)) -> Future:
        """Call a method of every rank's model.

        Args:
            method: its name.
            arguments: its arguments.
            join: makes one result of those of several ranks; default: rank 0's.

        Returns:
            The result, or the first error.
        """
        calls = self._begin(method, *arguments)
        return calls[0] if self._board.alone else in_thread(lambda: join(self._answers(method, calls)))

    def _begin(self, method: str, *arguments: Any) -> list[Future]:
        """Call a method of every rank's model; return the calls, by rank. That of this rank runs in a thread.

        It may wait for another rank in a collective, whose error must be seen meanwhile.
        """
        others, before = self._board.call(method, *arguments), self._before

        def here() -> Any:
            # A transfer that begins late must not go into the next one's connection. Only the end may overtake it.
            if before is not None and method != "finish_sync":
                concurrent.futures.wait([before])
            return getattr(self._model, method)(*arguments)

        mine = self._thread.start(here)
        if method != "finish_sync":
            self._before = mine
        return [mine, *others]

    def _answers(self, method: str, calls: Sequence[Future]) -> list[Any]:
        """Wait for the calls of a method, by rank; return their results.

        Raises:
            WeightSyncError: a rank did not answer in time.
            Exception: what a rank raised; of several another one's than rank 0's, which may only follow from it.
        """
        answered, late = wait_or_read(calls, self._timeout)
        for rank, call in [*enumerate(calls)][::-1]:
            if call in answered and (error := call.exception()):
                if rank:
                    error.args = (f"rank {rank}: {error}",)
                raise error
        if late:
            names = ", ".join(f"rank {rank}" for rank, call in enumerate(calls) if call in late)
            raise WeightSyncError(f"{names} did not end {method} within checkpoint_engine.timeout_seconds")
        return [call.result() for call in calls]
