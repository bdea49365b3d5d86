# SPDX-License-Identifier: Apache-2.0
"""Start a run's trainer ranks and engines where they were placed, and start lost ones again."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.config import CheckpointEngineConfig, RunConfig
from megarl.controller.actors.calls import Limit, wait_all
from megarl.controller.actors.engine_handle import EngineHandle
from megarl.controller.actors.pulse import Watch
from megarl.controller.actors.sampler_actor import SamplerEngine
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.actors.trainer import TrainerRank
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.losses import used_up
from megarl.controller.recording.screen import Screen
from megarl.errors import LostError
from megarl.launch.loans import Loans
from megarl.launch.placement.places import SAY_SECONDS, Places
from megarl.launch.transport import cannot_reach, resolve_transport
from megarl.run_folder import LOGS

# Calls of an engine at once: more than there ever are, since a sync must not wait behind those that sample. Ray only
# counts them.
ENGINE_CALLS = 100_000


class Staff:
    """The actors of a run, each in its bundle of the placement.

    Attributes:
        places: the bundles.
        trainers, samplers: the ranks and the engines.
        loans: what engines read in the ranks' memory.
        restarts: number of restarts of this session: ``engine`` and ``trainer``.
    """

    def __init__(self, config: RunConfig, places: Places, folder: Path, screen: Screen) -> None:
        """Start all actors; ``begin`` and ``build`` come next.

        Args:
            config: the run's config.
            places: where they are.
            folder: the run folder. The actors' output goes to its ``logs``.
            screen: tells what is waited for.
        """
        plan = places.plan
        self.places, self._train, self._screen = places, config.train, screen
        self._section, self._most = config.checkpoint_engine, config.sampler.max_restarts
        self._config, self._actors = ray.put(config), dict[str, Any]()
        shares, seconds = config.sampler.share_base, config.train.build_seconds
        self.loans = Loans(plan, self._lent_by, wanted=shares, seconds=seconds)
        self.restarts = {"engine": 0, "trainer": 0}
        ranks = [f"trainer rank {index}" for index in range(len(plan.trainer))]
        engines = [f"sampler {index}" for index in range(len(plan.engine))]
        self._bundles = dict(zip([*ranks, *engines], [*plan.trainer, *plan.engine], strict=True))
        self.watch = Watch([*ranks, *engines], folder / LOGS, config.train.hang_seconds)
        self.trainers = TrainerGroup([self._rank(index) for index in range(len(ranks))], self.watch, config.train)
        engines_started = [self._engine(index) for index in range(len(engines))]
        self.samplers = SamplerGroup(engines_started, self.watch, config.sampler)

    @property
    def transport(self) -> CheckpointEngineConfig:
        """The ``checkpoint_engine`` section; ``choose_transport`` has resolved its transport."""
        # A node that was lost may have taken what it held from beside its sender to another node.
        chosen, auto = self._section, self._auto
        apart = auto and cannot_reach(chosen.transport, self.places.plan)
        return chosen.model_copy(update={"transport": "gloo"}) if apart else chosen

    def begin(self) -> None:
        """Begin to start all engines, which takes longest; those that share the trainer's base come after it."""
        self._starting = {} if self.loans.wanted else self._start_engines()

    def build(self, check: Callable[[], None]) -> dict[str, dict[str, float]]:
        """Build the model in all ranks, side by side with the engines if they can; return once those have started too.

        What is lost meanwhile starts again.

        Args:
            check: called when the ranks are there, before they build.

        Returns:
            Name of each actor -> the seconds of its parts.

        Raises:
            MegarlError: one of them failed, or was lost once too often.
        """
        calls, begun = dict(self._starting), False
        while True:
            began = time.monotonic()
            try:
                if not begun:
                    check()
                    calls, begun = calls | self._begin_build(), True
                parts = dict(zip(calls, self._wait(calls), strict=True))
                if len(calls) == len(self._bundles):
                    return parts
                self.loans.allow()
                calls |= self._start_engines()
            except LostError as error:
                if time.monotonic() - began >= self._train.build_seconds:
                    raise
                calls |= self._start_again(error)
                begun = begun and not set(error.names) & set(self.trainers.names)
                if not begun and self.loans.wanted:
                    calls = {}

    def choose_transport(self) -> None:
        """Replace the transport ``auto``, and tell which one brings the weights."""
        self._auto = self._section.transport == "auto"
        self._section = resolve_transport(self._section, self.trainers, self.samplers, self._screen)

    def borrowed(self) -> str:
        """Return a line about what engines read in the trainer's memory; empty if they share nothing."""
        if not self.loans.wanted:
            return ""
        engine = self.samplers.engines[0]  # the others borrow as much
        [workers] = self._wait({engine.name: engine.actor.borrowed.remote()})
        borrowed, total = (sum(worker[part] for worker in workers) for part in (0, 1))
        own = sorted({name for *_, names in workers for name in names})
        rest = f"; vLLM has copies of its own of {', '.join(own)}" if own else ""
        return (
            f"engines read {borrowed / 2**30:.1f} of the {total / 2**30:.1f} GiB of the base in the trainer's memory "
            f"(sampler.share_base){rest}"
        )

    def restart_trainers(self) -> None:
        """End all ranks and start them again, as they were at the beginning of the run.

        Raises:
            MegarlError: one of them failed.
            NodeLostError: the node of one is lost, and no other came.
        """
        self._new_ranks()
        self._wait(self._begin_build(), told=True)
        self.loans.allow()

    def restart_engine(self, index: int) -> Any:
        """End an engine and start it again; return its new actor. It holds no weights that may be sampled from.

        Raises:
            MegarlError: it did not start.
            NodeLostError: its node is lost, and no other came.
        """
        actor = self._new_engine(index)
        self._wait({f"sampler {index}": actor.start.remote(*self.loans.of(index))}, told=True)
        return actor

    def end(self) -> None:
        """Kill all actors, and give their resources back."""
        for actor in list(self._actors.values()):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self.samplers.dispatcher.close()
        self.watch.kill_left()
        self.watch.close()

    def _start_again(self, error: LostError) -> dict[str, Any]:
        """Start what was lost while building again; return the calls of engines.

        Raises:
            LostError: ``error``, if no restart is left.
        """
        engines = [engine for engine in self.samplers.engines if engine.name in error.names]
        ranks = [name for name in self.trainers.names if name in error.names]
        if not engines and not ranks:
            raise error
        for kind, lost, most in (("engine", engines, self._most), ("trainer", ranks, self._train.max_restarts)):
            setting = f"{'sampler' if kind == 'engine' else 'train'}.max_restarts"
            if lost and self.restarts[kind] >= most:
                raise used_up(error, setting, most)
            self.restarts[kind] += bool(lost)
        self._screen.say(f"{', '.join(error.names)} is lost while building, and starts again: {error}", "bold yellow")
        if ranks:
            self._new_ranks()
            if self.loans.wanted:  # what they share is gone; they begin when the new ranks are there
                for engine in self.samplers.engines:
                    engine.actor = self._new_engine(engine.index)
                return {}
        for engine in engines:
            engine.actor = self._new_engine(engine.index)
        return self._start_engines(engines)

    def _start_engines(self, engines: Sequence[EngineHandle] | None = None) -> dict[str, Any]:
        """Begin to start engines, by default all; return the calls."""
        chosen = self.samplers.engines if engines is None else engines
        return {engine.name: engine.actor.start.remote(*self.loans.of(engine.index)) for engine in chosen}

    def _lent_by(self, rank: int) -> bytes:
        """Ask a rank for what an engine reads in its memory; one that trains answers after that."""
        return self._wait({self.trainers.names[rank]: self.trainers.ranks[rank].lend_base.remote()})[0]

    def _new_ranks(self) -> None:
        self.loans.withdraw()
        self._end(*self.trainers.names)
        self._await_nodes(self.trainers.names)
        self.trainers.ranks = [self._rank(index) for index in range(len(self.trainers.ranks))]

    def _new_engine(self, index: int) -> Any:
        self._end(f"sampler {index}")
        self._await_nodes([f"sampler {index}"])
        return self._engine(index)

    def _begin_build(self) -> dict[str, Any]:
        """Let the ranks meet and build the model; return the calls."""
        plan, first = self.places.plan, self.trainers.names[0]
        meeting = self.trainers.ranks[0].rendezvous.remote(plan.ranks_alone)
        address, port = self._wait({first: meeting})[0]
        return self.trainers.start("build", address, port, plan.trainer_threads)

    def _wait(self, calls: dict[str, Any], *, told: bool = False) -> list[Any]:
        """Wait for calls of actors that are being started; see ``wait_all``.

        Args:
            calls: the calls.
            told: True if nobody else shows that this is waited for.
        """
        limit = Limit("train.build_seconds", self._train.build_seconds)
        bundles = {name: self._bundles[name] for name in calls}
        began = said = time.monotonic()

        def look() -> None:
            nonlocal said
            self.places.check(bundles)
            if told and time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                waited = f"{said - began:.0f} s of at most {limit.seconds:g} ({limit.setting})"
                self._screen.say(f"waiting for {', '.join(calls)} to start again, {waited}")

        return wait_all(calls, self.watch, limit, look=look)

    def _await_nodes(self, names: Sequence[str]) -> None:
        say = partial(self._screen.say, style="bold yellow")
        self.places.restore([self._bundles[name] for name in names], say)

    def _end(self, *names: str) -> None:
        """Kill actors and the processes that they started, which free their bundles and their GPUs."""
        for name in names:
            with contextlib.suppress(Exception):
                ray.kill(self._actors[name], no_restart=True)
        self.watch.end(*names)

    def _rank(self, index: int) -> Any:
        name = f"trainer rank {index}"
        place = self.places.options(self._bundles[name], self.places.plan.trainer_gpus)
        make = partial(ray.remote(TrainerRank).options(**place).remote, self._config)
        return self._kept(name, make(self.watch.participant(name, index)))

    def _engine(self, index: int) -> Any:
        name, plan = f"sampler {index}", self.places.plan
        place = self.places.options(self._bundles[name], plan.engine_gpus)
        make = ray.remote(SamplerEngine).options(**place, max_concurrency=ENGINE_CALLS).remote
        # Ray gives an actor GPUs of one bundle.
        gpus = self.places.gpus(plan.beside(index), plan.engine_gpus)
        return self._kept(name, make(self._config, plan.engine_threads, self.watch.participant(name, index), *gpus))

    def _kept(self, name: str, actor: Any) -> Any:
        self._actors[name] = actor
        return actor
