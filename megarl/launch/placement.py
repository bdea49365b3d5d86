# SPDX-License-Identifier: Apache-2.0
"""Place actors with Ray: list the nodes, reserve a plan's bundles, make an actor's options."""

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
        config: the run's config.
        scratch: folder for the files of a local cluster.

    Raises:
        WorkerError: RAY_ADDRESS is set and no cluster answers there, or Ray did not start.
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
    try:
        with handlers_kept():
            ray.init(**options)
    except Exception as error:  # Ray raises bare Exceptions too
        problem = f"RAY_ADDRESS is '{address}', but no Ray cluster answers there" if address else "Ray did not start"
        raise WorkerError(f"{problem}: {error}") from error


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
    # vLLM's sockets are files, which a killed engine leaves behind. Its ranks meet on this host too.
    os.environ["VLLM_RPC_BASE_PATH"] = str(scratch)
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)


def place(config: RunConfig, seconds: float = PLACEMENT_SECONDS) -> tuple[Plan, PlacementGroup]:
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
            plan = plan_placement(decided, cluster_nodes(ray._private.state.available_resources_per_node()))
            if whole.with_controller and not plan.with_controller:
                raise WorkerError("the controller's node has too few free GPUs for trainer rank 0")
            return plan, reserve(plan, deadline - time.monotonic())
        except (ConfigError, WorkerError) as error:
            if time.monotonic() > deadline:
                raise WorkerError(f"other jobs hold what this run needs, for {seconds:.0f} s now: {error}") from error
        time.sleep(POLL_SECONDS)


def cluster_nodes(free: Mapping[str, Mapping[str, float]] | None = None) -> list[Node]:
    """Return the cluster's living nodes, this process's node first.

    Args:
        free: node id -> Ray resources that may be used; default: all of each node.
    """
    own_id = ray.get_runtime_context().get_node_id()
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            usable = node["Resources"] if free is None else free.get(node["NodeID"], {})
            cpus = int(usable.get("CPU", 0))
            cores = min(cpus, os.cpu_count() or 1) if node["NodeID"] == own_id else cpus
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            nodes.append(Node(node["NodeID"], name, int(usable.get("GPU", 0)), cpus, cores))
    return sorted(nodes, key=lambda node: (node.id != own_id, node.id))


def reserve(plan: Plan, seconds: float = PLACEMENT_SECONDS) -> PlacementGroup:
    """Reserve each bundle on its node. Ray itself would choose the nodes, in any order.

    Raises:
        WorkerError: a node does not have the resources of the plan.
    """
    selectors = [{"ray.io/node-id": node.id} for node in plan.nodes]
    group = placement_group(plan.bundles, strategy="PACK", bundle_label_selector=selectors)
    try:
        ray.get(group.ready(), timeout=max(seconds, POLL_SECONDS))
    except ray.exceptions.GetTimeoutError:
        ray.util.remove_placement_group(group)
        raise WorkerError(f"Ray did not reserve this within {seconds:.0f} s:\n{plan.describe()}") from None
    return group


def options(group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
    """Return actor options that place it into a bundle. It is never restarted, because its state would be lost."""
    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
