# SPDX-License-Identifier: Apache-2.0
"""Sync weights in a torchrun job: every rank has the model, rank 0 also drives the engines. No Ray.

Rank 0 runs the ``CheckpointEngineManager``. What the manager asks of the trainer goes to all ranks through a store of
the job's own, and so do their answers: an error of any rank is seen at once, also while the others wait in a
collective.
"""

import concurrent.futures
import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.checkpoint_engine.choice import choose_transport, own_sender
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.mixin import CheckpointEngineMixin, Sent
from megarl.checkpoint_engine.participants import Sink, gather
from megarl.checkpoint_engine.phases import SyncReport
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.config.load import parse_section
from megarl.errors import MegarlError, WeightSyncError
from megarl.futures import KeptThread, in_thread
from megarl.network import LOOPBACK, own_address
from megarl.parallel.rendezvous import open_store

T = TypeVar("T")

# Seconds between two looks into the store: at most so many, and this share of what was waited so far.
SHORTEST_PAUSE, LONGEST_PAUSE, PAUSE_SHARE = 1e-4, 5e-3, 0.02
# The other ranks wait this much longer than rank 0, whose error says more.
GRACE_SECONDS = 30.0


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
        self._board = _Board(self._config.timeout_seconds)
        self._manager: CheckpointEngineManager | None = None

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
            self._board.end(outcome)

    def _new_manager(self) -> CheckpointEngineManager:
        timeout, engines = self._config.timeout_seconds, self._engines
        if self._config.transport == "auto" and engines:
            sender = own_sender()
            calls = {one.name: partial(one.places, sender) for one in engines}
            places = gather(calls, time.monotonic() + timeout, "start")
            name, _ = choose_transport(sender.memory, [place for part in places for place in part])
            self._config = self._config.model_copy(update={"transport": name})
        return CheckpointEngineManager(_AllRanks(self._model, self._board, timeout), engines, self._config)

    def _serve(self) -> Any:
        """Do what rank 0 asks for, until it says how the sync ended."""
        while True:
            method, arguments = self._board.next_call(self._config.timeout_seconds + GRACE_SECONDS)
            if method is None:
                [outcome] = arguments
                with contextlib.suppress(RuntimeError):  # rank 0 has what it needs, and may have ended
                    self._board.answer(None)
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome
            failure: MegarlError | None = None
            try:
                getattr(self._model, method)(*arguments)
            except Exception as error:
                failure = error if isinstance(error, MegarlError) else WeightSyncError(repr(error))
            self._board.answer(failure)


class _AllRanks:
    """The trainer as rank 0 sees it: the ``Source`` of its manager."""

    def __init__(self, model: CheckpointEngineMixin, board: "_Board", timeout: float) -> None:
        self._model, self._board, self._timeout = model, board, timeout
        self._thread = KeptThread()
        self._before: Future | None = None
        # A thread begins with device 0.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def prepare(self, config: CheckpointEngineConfig, receivers: int) -> Future[bytes]:
        """See ``checkpoint_engine.participants.Source``."""
        return self._call("prepare_sync", config, receivers)

    def send(self, version: int, kind: Kind) -> Future[Sent]:
        """See ``checkpoint_engine.participants.Source``."""
        return self._call("send_weights", version, kind)

    def finish(self) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        return self._call("finish_sync")

    def _call(self, method: str, *arguments: Any) -> Future:
        """Call a method of every rank's model; rank 0's result once all have one, or the first error."""
        number, before = self._board.call(method, arguments), self._before

        def here() -> Any:
            # A transfer that begins late must not go into the next one's connection. Only the end may overtake it.
            if before is not None and method != "finish_sync":
                concurrent.futures.wait([before])
            if self._device is not None:
                torch.cuda.set_device(self._device)
            return getattr(self._model, method)(*arguments)

        mine = self._thread.start(here)
        if method != "finish_sync":
            self._before = mine
        if self._board.alone:
            return mine

        def everywhere() -> Any:
            """Wait for every rank; return this rank's result."""
            began = time.monotonic()
            deadline = began + self._timeout
            while waiting := self._board.unanswered(number) + ([] if mine.done() else [0]):
                if mine.done():
                    mine.result()
                if time.monotonic() > deadline:
                    late = ", ".join(f"rank {rank}" for rank in sorted(waiting))
                    raise WeightSyncError(f"{late} did not end {method} within checkpoint_engine.timeout_seconds")
                waited = time.monotonic() - began
                time.sleep(min(max(SHORTEST_PAUSE, PAUSE_SHARE * waited), LONGEST_PAUSE))
            return mine.result()

        return in_thread(everywhere)


class _Board:
    """Calls of rank 0 and answers of the others, in a store that all of them are connected to.

    Rank 0 never waits inside the store: its threads share one connection, which a waiting one would hold.

    Attributes:
        alone: True if there is no other rank, and so no store.
    """

    def __init__(self, timeout: float) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.alone = self._ranks == 1
        self._number = 0
        # Rank 0: the first call whose keys are in the store, and the ends of syncs that a rank may not have read yet.
        self._oldest, self._ended = 1, list[int]()
        if self.alone:
            return
        place: list[Any] = [None]
        if self._rank == 0:
            one_host = os.environ.get("LOCAL_WORLD_SIZE", str(self._ranks)) == str(self._ranks)
            host = LOOPBACK if one_host else own_address()
            self._store = open_store(host, timeout)
            place[0] = (host, self._store.port)
        dist.broadcast_object_list(place, 0)
        if self._rank != 0:
            host, port = place[0]
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))

    def call(self, method: str | None, arguments: tuple) -> int:
        """Rank 0: leave a call; its number."""
        self._number += 1
        if not self.alone:
            self._store.set(f"call/{self._number}", pickle.dumps((method, arguments)))
        return self._number

    def end(self, outcome: Any) -> None:
        """Rank 0: leave the outcome of a sync, and delete those before that every other rank has read to their end."""
        number = self.call(None, (outcome,))
        if self.alone:
            return
        while self._ended and self._store.check(self._answers(self._ended[0])):
            end = self._ended.pop(0)
            for old in range(self._oldest, end + 1):
                for key in [f"call/{old}", *self._answers(old)]:
                    self._store.delete_key(key)
            self._oldest = end + 1
        self._ended.append(number)

    def unanswered(self, number: int) -> list[int]:
        """Rank 0: the ranks that have not answered a call; raises the error of one that failed."""
        waiting = []
        for rank, key in enumerate(self._answers(number), 1):
            if not self._store.check([key]):
                waiting.append(rank)
                continue
            failure = pickle.loads(self._store.get(key))
            if failure is not None:
                failure.args = (f"rank {rank}: {failure}",)
                raise failure
        return waiting

    def next_call(self, timeout: float) -> tuple[str | None, tuple]:
        """Another rank: wait for rank 0's next call, ``(method, arguments)``; None as method is the end of a sync."""
        self._number += 1
        key = f"call/{self._number}"
        try:
            self._store.wait([key], timedelta(seconds=timeout))
            return pickle.loads(self._store.get(key))
        except RuntimeError as error:
            raise WeightSyncError("rank 0 does not say how the sync goes on; it is gone or stuck") from error

    def answer(self, failure: MegarlError | None) -> None:
        """Another rank: say how the last call ended."""
        self._store.set(f"answer/{self._number}/{self._rank}", pickle.dumps(failure))

    def _answers(self, number: int) -> list[str]:
        return [f"answer/{number}/{rank}" for rank in range(1, self._ranks)]
