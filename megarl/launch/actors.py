# SPDX-License-Identifier: Apache-2.0
"""Start a run's trainer ranks and engines where they were placed, start lost ones again, and end all of them."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.checkpoint_engine.choice import choose_transport
from megarl.config import CheckpointEngineConfig, RunConfig
from megarl.controller.actors.calls import Limit, wait_all
from megarl.controller.actors.logs import LOGS
from megarl.controller.actors.pulse import Watch
from megarl.controller.actors.sampler_actor import SamplerEngine
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.actors.trainer import TrainerRank
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.recording.screen import Screen
from megarl.errors import ConfigError, MegarlError
from megarl.launch import placement
from megarl.launch.plan import Plan
from megarl.launch.processes import signals_ignored
from megarl.sampler.device_checks import check_device

# Everything must have ended 30 s after a failure. An engine gets this much of it to stop by itself.
CLOSE_SECONDS = 10.0
# Calls of an engine at once, beside those that sample: a sync must not wait behind them.
ENGINE_CALLS = 100


class Staff:
    """The actors of a run, each in its bundle of the placement.

    Attributes:
        trainers, samplers: the ranks and the engines.
        transport: the ``checkpoint_engine`` section with its transport resolved; set once all are built.
    """

    transport: CheckpointEngineConfig

    def __init__(self, config: RunConfig, plan: Plan, group: Any, folder: Path) -> None:
        """Start all actors; ``build`` and ``start`` come next.

        Args:
            config: the run's config.
            plan: where they are.
            group: Ray's placement group with the plan's bundles.
            folder: the run folder. The actors' output goes to its ``logs``.
        """
        self._plan, self._group, self._train = plan, group, config.train
        self._config, self._actors = ray.put(config), dict[str, Any]()
        self._calls_at_once = ENGINE_CALLS + config.most_prompts * config.sampler.samples_per_prompt
        ranks = [f"trainer rank {index}" for index in range(len(plan.trainer))]
        engines = [f"sampler {index}" for index in range(len(plan.engine))]
        self.watch = Watch([*ranks, *engines], folder / LOGS, config.train.hang_seconds)
        self.trainers = TrainerGroup([self._rank(index) for index in range(len(ranks))], self.watch, config.train)
        engines_started = [self._engine(index) for index in range(len(engines))]
        self.samplers = SamplerGroup(engines_started, self.watch, config.sampler)

    def begin(self) -> None:
        """Begin to start all engines, which takes longest."""
        self._starting = {engine.name: engine.actor.start.remote() for engine in self.samplers.engines}

    def build(self) -> dict[str, dict[str, float]]:
        """Build the model in all ranks, side by side with the engines; return once those have started too.

        Returns:
            Name of each actor -> the seconds of its parts.

        Raises:
            MegarlError: one of them failed.
        """
        calls = self._begin_build() | self._starting
        return dict(zip(calls, wait_all(calls, self.watch, self._limit()), strict=True))

    def restart_trainers(self) -> None:
        """End all ranks and start them again, as they were at the beginning of the run.

        Raises:
            MegarlError: one of them failed.
        """
        for name in self.trainers.names:
            self._end(name)
        self.trainers.ranks = [self._rank(index) for index in range(len(self.trainers.ranks))]
        wait_all(self._begin_build(), self.watch, self._limit())

    def restart_engine(self, index: int) -> Any:
        """End an engine and start it again; return its new actor. It holds no weights that may be sampled from.

        Raises:
            MegarlError: it did not start.
        """
        name = f"sampler {index}"
        self._end(name)
        actor = self._engine(index)
        wait_all({name: actor.start.remote()}, self.watch, self._limit())
        return actor

    def end(self) -> None:
        """Kill all actors."""
        for actor in list(self._actors.values()):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self.samplers.dispatcher.close()
        self.watch.kill_left()
        self.watch.close()

    def _begin_build(self) -> dict[str, Any]:
        """Let the ranks meet and build the model; return the calls."""
        meeting = self.trainers.ranks[0].rendezvous.remote(self._plan.ranks_alone)
        address, port = wait_all({self.trainers.names[0]: meeting}, self.watch, self._limit())[0]
        return self.trainers.start("build", address, port, self._plan.trainer_threads)

    def _limit(self) -> Limit:
        return Limit("train.build_seconds", self._train.build_seconds)

    def _end(self, name: str) -> None:
        """Kill an actor and the processes that it started, which free its bundle and its GPUs."""
        with contextlib.suppress(Exception):
            ray.kill(self._actors[name], no_restart=True)
        self.watch.end(name)

    def _rank(self, index: int) -> Any:
        name, plan = f"trainer rank {index}", self._plan
        place = placement.options(self._group, plan.trainer[index], plan.trainer_gpus)
        make = partial(ray.remote(TrainerRank).options(**place).remote, self._config)
        return self._kept(name, make(self.watch.participant(name, index)))

    def _engine(self, index: int) -> Any:
        name, plan = f"sampler {index}", self._plan
        place = placement.options(self._group, plan.engine[index], plan.engine_gpus)
        make = ray.remote(SamplerEngine).options(**place, max_concurrency=self._calls_at_once).remote
        return self._kept(name, make(self._config, plan.engine_threads, self.watch.participant(name, index)))

    def _kept(self, name: str, actor: Any) -> Any:
        self._actors[name] = actor
        return actor


@contextlib.contextmanager
def actors(config: RunConfig, screen: Screen, folder: Path, needed: Path, scratch: Path) -> Iterator[Staff]:
    """Start Ray, trainer ranks and engines side by side. On exit, for whatever reason, end all of them.

    Args:
        config: the resolved config.
        screen: screen that shows the progress.
        folder: the run folder.
        needed: file or folder that the ranks must be able to see: the checkpoint to resume from, or a file of the new
            run folder.
        scratch: folder for files that Ray and vLLM leave.

    Yields:
        The actors, built.
    """
    screen.phase("Ray")
    placement.start_ray(config, scratch)
    staff = group = None
    try:
        plan, group = placement.place(config)
        screen.say(plan.describe())
        check_device(config.engine, "cuda" if plan.trainer_gpus else "cpu")
        screen.phase("building")
        staff = Staff(config, plan, group, folder)
        staff.begin()
        check_shared(needed, staff.trainers, plan)
        for name, seconds in staff.build().items():
            if screen.start:
                screen.start.parts(name, seconds)
        staff.transport = resolve_transport(config.checkpoint_engine, staff.trainers, staff.samplers, screen)
        yield staff
        stop_engines(staff.samplers, screen)
    finally:
        end(staff, group)


def check_shared(needed: Path, trainers: TrainerGroup, plan: Plan) -> None:
    """Refuse nodes that cannot see the run folder. Rank 0 writes checkpoints there; on resume every rank reads one.

    Raises:
        ConfigError: a rank cannot see it; the message names the rank and its node.
    """
    for rank, seen in enumerate(trainers.call("sees", str(needed))):
        if not seen and (rank == 0 or needed.is_dir()):
            raise ConfigError(
                f"trainer rank {rank} on {plan.nodes[plan.trainer[rank]].name} does not see '{needed}'; put "
                "train.output on a file system that all nodes share"
                + (", or copy the checkpoint there" if rank else ", or start the run on a node with GPUs for rank 0")
            )


def stop_engines(samplers: SamplerGroup, screen: Screen) -> None:
    """Let the engines of a complete run stop by themselves. One that does not is killed later without harm."""
    try:
        samplers.close(CLOSE_SECONDS)
    except MegarlError as error:
        screen.say(f"an engine did not stop by itself and is killed: {error}")


def resolve_transport(
    section: CheckpointEngineConfig, trainers: TrainerGroup, samplers: SamplerGroup, screen: Screen
) -> CheckpointEngineConfig:
    """Return ``checkpoint_engine`` with ``auto`` replaced, and tell which transport brings the weights."""
    name, why = section.transport, "as set"
    if name == "auto":
        sender = trainers.start_on_rank_zero("memory").result()
        receivers = [memory for engine in samplers.engines for memory in engine.memories().result()]
        name, why = choose_transport(sender, receivers)
    screen.say(f"weights reach the engines by {name}: {why}")
    return section.model_copy(update={"transport": name})


def end(staff: Staff | None, group: Any) -> None:
    """Kill all actors and leave Ray. No signal interrupts it."""
    with signals_ignored():
        if staff is not None:
            staff.end()
        if group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
        ray.shutdown()
