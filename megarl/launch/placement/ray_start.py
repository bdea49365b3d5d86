# SPDX-License-Identifier: Apache-2.0
"""Start Ray, and place a run on its nodes."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.config import RunConfig
from megarl.errors import ConfigError, WorkerError
from megarl.launch.placement.places import Places, reserve
from megarl.launch.placement.plan import plan_placement
from megarl.launch.placement.ray_nodes import cluster_nodes, free_resources
from megarl.launch.processes import handlers_kept, signals_ignored
from megarl.network import LOOPBACK

logger = logging.getLogger(__name__)

# On a host with so many cores Ray starts while the run is prepared and its model checked. Ray gives up after 30 s
# (2.60, fixed), which it needs on a busy host with two cores.
MANY_CORES = 8
# How often a local Ray is started if other work keeps it from that.
TRIES = 2
PLACEMENT_SECONDS = 120
POLL_SECONDS = 1.0


@contextlib.contextmanager
def ray_for(config: RunConfig, scratch: Path) -> Iterator[Callable[[], None]]:
    """Start Ray beside what the block does, on a host with ``MANY_CORES``, and leave it when the block ends.

    Args:
        config, scratch: as for ``start_ray``.

    Yields:
        What returns once Ray is there, or raises what ``start_ray`` raises. With fewer cores it starts Ray.
    """
    # Ray's processes end when the thread that started them does (PR_SET_PDEATHSIG): it lives until they are gone.
    thread = ThreadPoolExecutor(1, thread_name_prefix="megarl-ray")
    begun: Future[None] | None = None
    if (os.cpu_count() or 1) >= MANY_CORES:
        begun = thread.submit(start_ray, config, scratch)
    try:
        yield begun.result if begun else partial(start_ray, config, scratch)
    finally:
        with signals_ignored():
            if begun:
                wait([begun])
            ray.shutdown()
            thread.shutdown()


def start_ray(config: RunConfig, scratch: Path) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a local one that only this run can reach.

    Args:
        config: the run's config.
        scratch: folder for the files of a local cluster.

    Raises:
        WorkerError: RAY_ADDRESS is set and no cluster answers there, or Ray did not start, ``TRIES`` times.
    """
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if not address:
        needed = config.parallel.world_size + config.sampler.engines
        # Ray counts cores; on a small host trainer and sampler take turns on the same ones.
        options |= {"address": "local", "num_cpus": max(needed, os.cpu_count() or 1), "include_dashboard": False}
        # Ray opens its own folder to all users. The folder around it admits nobody else.
        options["_temp_dir"] = str(scratch / "ray")
        make_private(scratch)
    with handlers_kept(), contextlib.nullcontext() if address else _sockets_in(scratch):
        try:
            _init(options, tries=1 if address else TRIES)
        except Exception as error:  # Ray raises bare Exceptions too
            problem = (
                f"RAY_ADDRESS is '{address}', but no Ray cluster answers there" if address else "Ray did not start"
            )
            raise WorkerError(f"{problem}: {error}") from error


def _init(options: dict[str, Any], tries: int) -> None:
    """Call ``ray.init``; again if it fails, since what it needs has then been read from the disk."""
    for left in reversed(range(tries)):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if not left:
                raise
            logger.warning("Ray did not start, and is started again: %s", error)


def make_private(scratch: Path) -> None:
    """Make a local Ray and its children listen on loopback, require a token, and keep their files in ``scratch``.

    Ray names the variable for listening on loopback after the systems on which that is the default (Ray 2.60; a test
    checks the sockets). Child processes read the variable. This process has read it already, so its constant is set
    too.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        # A token of this run only. Ray would write one into the home folder, readable for all.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _sockets_in(scratch: Path) -> Iterator[None]:
    """Let vLLM keep its sockets in ``scratch``, since a killed engine leaves them behind, and its ranks on loopback.

    That holds for engines of a Ray that the block starts, as long as they live, and not for the caller's own later.
    """
    given = {name: os.environ.get(name) for name in ("VLLM_RPC_BASE_PATH", "VLLM_HOST_IP")}
    os.environ["VLLM_RPC_BASE_PATH"] = str(scratch)
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def place(config: RunConfig, seconds: float = PLACEMENT_SECONDS) -> Places:
    """Plan the run on the nodes of the cluster, and reserve its bundles there.

    Waits for resources that other jobs (or the end of this run's previous session) hold.

    Raises:
        ConfigError: the cluster could not hold the run even if it were empty.
        WorkerError: not enough became free within ``seconds``.
    """
    whole = plan_placement(config, cluster_nodes())
    # Resources that other jobs hold at present may delay the run, but not change it.
    sampler = config.sampler.model_copy(update={"share_gpus": whole.shares_gpus})
    train = config.train.model_copy(update={"device": "cuda" if whole.trainer_gpus else "cpu"})
    decided = config.model_copy(update={"sampler": sampler, "train": train})
    deadline = time.monotonic() + seconds
    while True:
        try:
            plan = plan_placement(decided, cluster_nodes(free_resources()))
            if whole.with_controller and not plan.with_controller:
                raise WorkerError("the controller's node has too few free GPUs for trainer rank 0")
            return Places(plan, reserve(plan, deadline - time.monotonic()), config.train.node_seconds)
        except (ConfigError, WorkerError) as error:
            if time.monotonic() > deadline:
                raise WorkerError(f"other jobs hold what this run needs, for {seconds:.0f} s now: {error}") from error
        time.sleep(POLL_SECONDS)
