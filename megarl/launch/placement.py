# SPDX-License-Identifier: Apache-2.0
"""Ray's side of placement: its nodes, the reservation of a plan's bundles, and what an actor asks for."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.errors import ConfigError, WorkerError
from megarl.launch.plan import Node, Plan, plan_placement
from megarl.launch.processes import handlers_kept
from megarl.network import LOOPBACK

PLACEMENT_SECONDS = 120
POLL_SECONDS = 1.0


def start_ray(config: RunConfig, scratch: Path) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a local one that only this run can reach.

    Args:
        config: the run.
        scratch: folder for what a local cluster writes.

    Raises:
        WorkerError: RAY_ADDRESS is set and no cluster answers there.
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
        # Ray opens its own folder to all users; nobody else enters the one around it.
        options["_temp_dir"] = str(scratch / "ray")
        make_private(scratch)
    try:
        with handlers_kept():
            ray.init(**options)
    except Exception as error:  # Ray raises bare ones too
        where = f"RAY_ADDRESS is '{address}', but no Ray cluster answers there" if address else "Ray did not start"
        raise WorkerError(f"{where}: {error}") from error


def make_private(scratch: Path) -> None:
    """Let a local Ray and what it starts listen on loopback, ask for a token, and keep their files in ``scratch``.

    Ray's name for "nothing listens on the network" is that of the systems where it is the default (Ray 2.60; a test
    looks at the sockets). A child reads the variable, this process has read it already.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        # Of this run only: Ray would write one into the home folder, for all to read.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # vLLM's sockets are files, which an engine that is killed leaves behind; its ranks meet on this host too.
    os.environ["VLLM_RPC_BASE_PATH"] = str(scratch)
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)


def place(config: RunConfig, seconds: float = PLACEMENT_SECONDS) -> tuple[Plan, PlacementGroup]:
    """Plan the run on the nodes of the cluster and reserve its bundles there.

    Waits for what other jobs (or the end of this one's last session) hold.

    Raises:
        ConfigError: the cluster could not hold the run even if it were empty.
        WorkerError: too little has become free within ``seconds``.
    """
    whole = plan_placement(config, cluster_nodes())
    # What other jobs hold for now may only delay the run, not change what it is.
    sampler = config.sampler.model_copy(update={"share_gpus": whole.shares_gpus})
    train = config.train.model_copy(update={"device": "cuda" if whole.trainer_gpus else "cpu"})
    decided = config.model_copy(update={"sampler": sampler, "train": train})
    deadline = time.monotonic() + seconds
    while True:
        try:
            plan = plan_placement(decided, cluster_nodes(ray._private.state.available_resources_per_node()))
            if whole.with_controller and not plan.with_controller:
                raise WorkerError("the controller's node has too few free GPUs for trainer rank 0")
            return plan, reserve(plan, deadline - time.monotonic())
        except (ConfigError, WorkerError) as error:
            if time.monotonic() > deadline:
                raise WorkerError(f"other jobs hold what this run needs, for {seconds:.0f} s now: {error}") from error
        time.sleep(POLL_SECONDS)


def cluster_nodes(free: Mapping[str, Mapping[str, float]] | None = None) -> list[Node]:
    """Nodes of the cluster that are alive, this process's own first.

    Args:
        free: node id -> Ray resources that may be used; default: all of each node.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            usable = node["Resources"] if free is None else free.get(node["NodeID"], {})
            cpus = int(usable.get("CPU", 0))
            cores = min(cpus, os.cpu_count() or 1) if node["NodeID"] == own else cpus
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            nodes.append(Node(node["NodeID"], name, int(usable.get("GPU", 0)), cpus, cores))
    return sorted(nodes, key=lambda node: (node.id != own, node.id))


def reserve(plan: Plan, seconds: float = PLACEMENT_SECONDS) -> PlacementGroup:
    """Reserve each bundle on its node. Ray alone would put them on any nodes, in any order.

    Raises:
        WorkerError: a node does not have what the plan counts on.
    """
    where = [{"ray.io/node-id": node.id} for node in plan.nodes]
    group = placement_group(plan.bundles, strategy="PACK", bundle_label_selector=where)
    try:
        ray.get(group.ready(), timeout=max(seconds, POLL_SECONDS))
    except ray.exceptions.GetTimeoutError:
        ray.util.remove_placement_group(group)
        raise WorkerError(f"Ray did not reserve this within {seconds:.0f} s:\n{plan.describe()}") from None
    return group


def options(group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
    """Actor options that put it into a bundle; it is never restarted, since its state would be lost."""
    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
