# SPDX-License-Identifier: Apache-2.0
"""Survive lost engines and trainer ranks: start them again, verify what they hold, and go on.

An engine's prompts go to the other engines at once. Its successor starts in a thread, and is readmitted the next time
that the trainers are idle: it gets base and policy, both verified, and passes the canary before its first request.
Trainer ranks start again together from the last checkpoint, and every engine is readmitted with that policy.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from megarl.checkpoint_engine.phases import SyncReport
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.controller.actors.calls import dead
from megarl.controller.actors.engine_handle import EngineHandle
from megarl.controller.ending import end_if_asked
from megarl.controller.going_back import go_back
from megarl.controller.losses import names_in, used_up
from megarl.errors import LostError, MegarlError, WeightSyncError, WorkerError
from megarl.futures import in_thread

if TYPE_CHECKING:
    from megarl.controller.state import RunState

# Seconds in which Ray tells that an actor is dead, and in which one that is well answers.
PING_SECONDS = 5.0
# A participant without a sign of life for this long is suspected; it is then waited for, or lost.
SUSPECT_SECONDS = 4.0
LOOK_SECONDS = 0.2


class Staff(Protocol):
    """Starts actors again; see ``megarl.launch.actors.Staff``."""

    restarts: dict[str, int]

    @property
    def transport(self) -> CheckpointEngineConfig:
        """The ``checkpoint_engine`` section, with the transport for where the actors are now."""
        ...

    def restart_engine(self, index: int) -> Any:
        """End an engine and start it again; return its new actor."""
        ...

    @property
    def loans(self) -> Any:
        """The memory of the ranks that engines read; see ``megarl.launch.loans.Loans``."""
        ...

    def restart_trainers(self) -> None:
        """End all trainer ranks and start them again."""
        ...


class Recovery:
    """Restarts what is lost, as often as ``sampler.max_restarts`` and ``train.max_restarts`` allow.

    The main thread calls everything but ``engine_lost``, which any thread may call.

    Attributes:
        restarts: number of restarts of this session: ``engine`` and ``trainer``.
    """

    def __init__(self, state: "RunState", staff: Staff) -> None:
        self._state, self._staff = state, staff
        self.restarts = staff.restarts  # building the actors may have taken some
        self._shown = dict.fromkeys(self.restarts, 0)
        self._lock = threading.Lock()
        self._ready: list[tuple[EngineHandle, str]] = []
        self._ended = set[str]()  # engines that were ended with the trainer

    def begin(self) -> None:
        """Hear of lost engines from now on."""
        self._state.samplers.dispatcher.on_lost = self.engine_lost
        self._state.samplers.look = self.look

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call, for the metrics of a step."""
        shown, self._shown = self._shown, dict(self.restarts)
        counted = {f"{name}_restarts": float(self._shown[name] - shown[name]) for name in shown}
        return counted | {"requests_sent_again": float(self._state.samplers.dispatcher.sent_again())}

    def engine_lost(self, engine: EngineHandle, error: WorkerError) -> None:
        """Start an engine again in a thread; if that is not allowed any more, every request fails."""
        most = self._state.config.sampler.max_restarts
        if engine.name in self._ended:
            self._ended.discard(engine.name)
            in_thread(partial(self._start_engine, engine, str(error)))
            return
        with self._lock:
            if self.restarts["engine"] >= most:
                self._state.samplers.dispatcher.fail(used_up(error, "sampler.max_restarts", most))
                return
            self.restarts["engine"] += 1
            number = self.restarts["engine"]
        self._say(
            f"{engine.name} is lost and starts again ({number} of at most {most}, sampler.max_restarts); its prompts "
            f"go to other engines: {error}"
        )
        in_thread(partial(self._start_engine, engine, str(error)))

    def look(self) -> None:
        """Raise if the run cannot go on, and readmit engines that have started again. The trainers are idle."""
        self._state.trainers.check()
        self._state.samplers.dispatcher.check()
        if self._ready:
            self._readmit()

    def first_sync(self) -> list[SyncReport]:
        """Bring base and policy to every engine: at the start, and after the trainers went back."""
        state = self._state
        section = state.config.checkpoint_engine
        if state.config.sampler.sleep:
            state.samplers.wake()
        kinds: list[Kind] = ["base", section.content] if section.base_weights == "send" else [section.content]
        self._leave_out()
        try:
            if state.manager.present and not state.manager.stale:
                return [state.manager.sync(state.updates, kind) for kind in kinds]
        except WeightSyncError as error:
            self._blame(error)
        return self._readmit()

    def sync(self) -> SyncReport:
        """Sync the trainers' version to every engine that is there; readmit those that a failed sync left behind.

        Raises:
            LostError: a trainer rank is lost.
            WeightSyncError: the sync failed though nothing is lost.
        """
        state = self._state
        self._leave_out()
        try:
            if state.manager.present:
                return state.manager.sync(state.updates, state.config.checkpoint_engine.content)
        except WeightSyncError as error:
            self._blame(error)
        return self._readmit()[-1]

    def restart_trainers(self, error: MegarlError) -> None:
        """Start all ranks again and load the last checkpoint. ``first_sync`` comes next.

        Raises:
            MegarlError: ``error``, if no rank is lost or no restart is left; or the restart failed.
        """
        state, most = self._state, self._state.config.train.max_restarts
        lost = self._lost_ranks(error)
        if not lost:
            raise error
        if self.restarts["trainer"] >= most:
            raise used_up(error, "train.max_restarts", most)
        self.restarts["trainer"] += 1
        self._say(
            f"{', '.join(lost)} is lost and all ranks start again ({self.restarts['trainer']} of at most {most}, "
            f"train.max_restarts): {error}"
        )
        state.recorder.phase("restarting the trainer")
        self._end_borrowers(lost)
        try:
            self._staff.restart_trainers()
            go_back(state)
        except LostError as again:
            self.restart_trainers(again)
            return
        self._leave_out()
        # What the engines hold may be of a version that was never saved, and whose number comes again.
        state.manager.refuse(f"the trainer went back to version {state.updates}")

    def _end_borrowers(self, lost: Sequence[str]) -> None:
        """Start the engines again that read the base in the ranks' memory; they wait for the new ranks."""
        if not self._staff.loans.wanted:
            return
        self._staff.loans.withdraw()
        for engine in self._state.samplers.engines:
            if engine.lost is None:
                self._ended.add(engine.name)
                reason = f"{engine.name} shared the base of {', '.join(lost)} (sampler.share_base)"
                self._state.samplers.dispatcher.lose(engine, LostError.of([engine.name], reason))

    def _start_engine(self, engine: EngineHandle, reason: str) -> None:
        try:
            engine.actor = self._staff.restart_engine(engine.index)
        except WorkerError as error:
            self.engine_lost(engine, error)
        except Exception as error:  # a NodeLostError too
            self._state.samplers.dispatcher.fail(WorkerError(f"{engine.name} could not be started again: {error}"))
        else:
            self._ready.append((engine, reason))

    def _leave_out(self) -> None:
        """Tell the manager which engines are lost."""
        manager = self._state.manager
        for engine in self._state.samplers.engines:
            if engine.lost is not None and engine.name in manager.present:
                manager.lose(engine.name, engine.lost)

    def _readmit(self) -> list[SyncReport]:
        """Readmit every engine that refuses or has started again; wait for one if none is left."""
        state = self._state
        while True:
            self._leave_out()
            while self._ready:
                engine, reason = self._ready.pop(0)
                state.manager.replace(engine, reason)
                # Requests wait until it is open, but it can be lost again.
                engine.closed, engine.lost = True, None
            names = list(state.manager.stale)
            if not names:
                end_if_asked(state)
                self._state.trainers.check()
                self._state.samplers.dispatcher.check()
                time.sleep(LOOK_SECONDS)
                continue
            state.recorder.phase("readmitting engines")
            state.manager.use(self._staff.transport)
            try:
                reports = state.manager.readmit(state.updates, self._check)
            except WeightSyncError as error:
                self._blame(error)
                continue
            for engine in state.samplers.engines:
                if engine.name in names:
                    state.samplers.dispatcher.open(engine)
            self._say(f"{', '.join(names)} holds version {state.updates}, verified, and goes on")
            return reports

    def _check(self, names: Sequence[str]) -> None:
        """Compare engines with the trainers on a fixed sequence, before their first request."""
        state = self._state
        if state.canary is None:
            return
        tokens = state.canary.tokens
        trainer = state.trainers.score(tokens, state.config.checkpoint_engine.timeout_seconds)
        scored = state.samplers.score(tokens, state.updates, names)
        if absent := [name for name in names if name not in scored]:
            raise WeightSyncError(f"{', '.join(absent)} died when it was compared with the trainer")
        state.canary.check(state.updates, trainer, scored)

    def _blame(self, error: WeightSyncError) -> None:
        """Find the engines whose loss made a sync fail.

        Raises:
            LostError: a trainer rank is lost.
            WeightSyncError: ``error``; nothing is lost.
        """
        state = self._state
        if lost := self._lost_ranks(error):
            raise LostError.of(lost, str(error)) from error
        named, found = names_in(error), False
        living = [engine for engine in state.samplers.engines if engine.lost is None]
        silent = self._silent([engine.name for engine in living])
        problems = silent | dead({engine.name: engine.actor for engine in living}, PING_SECONDS, state.trainers.watch)
        for engine in living:
            if engine.name in problems or engine.name in named:
                state.samplers.dispatcher.lose(engine, problems.get(engine.name, WorkerError(str(error))))
        for engine in state.samplers.engines:
            found = found or (engine.lost is not None and engine.name in state.manager.present)
        if not found:
            raise error

    def _lost_ranks(self, error: BaseException) -> list[str]:
        """Return the trainer ranks that an error names as lost, or that are dead or silent."""
        trainers = self._state.trainers
        names = names_in(error)
        if not isinstance(error, WorkerError | WeightSyncError):
            return []
        if found := [name for name in trainers.names if name in names]:
            return found
        if names:  # engines
            return []
        ranks = dict(zip(trainers.names, trainers.ranks, strict=True))
        return [*dead(ranks, PING_SECONDS, trainers.watch)] or [*self._silent(trainers.names)]

    def _silent(self, names: Sequence[str]) -> dict[str, WorkerError]:
        """Return the participants without signs of life; one that is suspected is waited for."""
        watch = self._state.trainers.watch
        found: dict[str, WorkerError] = {}
        while suspects := [one for one in names if one not in found and watch.silence(one) > SUSPECT_SECONDS]:
            for name in suspects:
                try:
                    watch.check([name])
                except LostError as error:
                    found[name] = error
            time.sleep(LOOK_SECONDS)
        return found

    def _say(self, text: str) -> None:
        self._state.recorder.screen.say(text, style="bold yellow")
