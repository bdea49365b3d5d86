# SPDX-License-Identifier: Apache-2.0
"""Start Ray and a run's actors, check that they can work together, and end all of them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from megarl.config import RunConfig
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.recording.screen import Screen
from megarl.errors import ConfigError, MegarlError
from megarl.launch.names import check_model
from megarl.launch.placement import ray_start
from megarl.launch.placement.places import Places
from megarl.launch.placement.plan import Plan
from megarl.launch.processes import signals_ignored
from megarl.launch.staff import Staff
from megarl.launch.transport import check_transport
from megarl.sampler.engine.device_checks import check_device

# Everything must have ended 30 s after a failure. An engine gets this much of it to stop by itself.
CLOSE_SECONDS = 10.0


@contextlib.contextmanager
def actors(
    config: RunConfig, screen: Screen, folder: Path, needed: Path, ray_is_there: Callable[[], None]
) -> Iterator[Staff]:
    """Start trainer ranks and engines side by side. On exit, for whatever reason, end all of them.

    Args:
        config: the resolved config.
        screen: screen that shows the progress.
        folder: the run folder.
        needed: file or folder that the ranks must be able to see: the checkpoint to resume from, or a file of the new
            run folder.
        ray_is_there: waits for Ray, or starts it; from ``ray_for``.

    Yields:
        The actors, built.
    """
    screen.phase("Ray")
    model_checked = ThreadPoolExecutor(1).submit(check_model, config)
    if (os.cpu_count() or 1) < ray_start.MANY_CORES:
        model_checked.result()
    ray_is_there()
    staff = places = None
    try:
        model_checked.result()
        places = ray_start.place(config)
        screen.say(places.plan.describe())
        check_transport(config.checkpoint_engine.transport, places.plan)
        check_device(config.engine, "cuda" if places.plan.trainer_gpus else "cpu")
        screen.phase("building")
        staff = Staff(config, places, folder, screen)
        staff.begin()
        for name, seconds in staff.build(partial(check_shared, needed, staff.trainers, places.plan)).items():
            if screen.start:
                screen.start.parts(name, seconds)
        if shared := staff.borrowed():
            screen.say(shared)
        staff.choose_transport()
        yield staff
        stop_engines(staff.samplers, screen)
    finally:
        end(staff, places)


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


def end(staff: Staff | None, places: Places | None) -> None:
    """Kill all actors. No signal interrupts it."""
    with signals_ignored():
        if places is not None:
            places.end_waits()
        if staff is not None:
            staff.end()
        if places is not None:
            places.release()
