"""Ray resources -> where trainer ranks and sampler engines go."""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import RunConfig
from megarl.errors import ConfigError, WorkerError

PLACEMENT_SECONDS = 120


@dataclass(frozen=True)
class Plan:
    """Bundles and who uses which.

    Attributes:
        bundles: Ray resource bundles.
        trainer: bundle index of each trainer rank.
        engine: bundle index of each sampler engine.
        trainer_gpus, engine_gpus: GPUs (or the share of one) that each asks of its bundle.
        threads: CPU threads of each trainer rank and each engine.
    """

    bundles: list[dict[str, float]]
    trainer: list[int]
    engine: list[int]
    trainer_gpus: float
    engine_gpus: float
    trainer_threads: int
    engine_threads: int


def plan_placement(config: RunConfig, gpus: int, cpus: int) -> Plan:
    """Decide without asking Ray.

    With enough GPUs every rank and engine has its own. With enough for the trainer only, engines share the trainer's.
    Without GPUs everything runs on CPUs, which trainer and sampler use in turns.

    Args:
        config: the run.
        gpus: in the whole cluster; 0 for a CPU run.
        cpus: in the whole cluster.

    Raises:
        ConfigError: too few GPUs for the trainer ranks, or an engine that would need several shared GPUs.
    """
    ranks, engines, width = config.parallel.world_size, config.sampler.engines, config.sampler.tensor
    if not gpus:
        return Plan(
            bundles=[{"CPU": 1.0}] * (ranks + engines),
            trainer=list(range(ranks)),
            engine=list(range(ranks, ranks + engines)),
            trainer_gpus=0,
            engine_gpus=0,
            trainer_threads=max(1, cpus // ranks),
            engine_threads=max(1, cpus // engines),
        )
    if gpus >= ranks + engines * width:
        bundles = [{"CPU": 1.0, "GPU": 1.0}] * ranks + [{"CPU": 1.0, "GPU": float(width)}] * engines
        return Plan(bundles, list(range(ranks)), list(range(ranks, ranks + engines)), 1, width, 1, 4)
    if gpus < ranks:
        raise ConfigError(
            f"parallel.tensor x pipeline x context x data needs {ranks} GPUs, Ray sees {gpus}; "
            "make the layout smaller or add nodes"
        )
    if width > 1 or engines > ranks:
        raise ConfigError(
            f"{ranks} trainer ranks and {engines} engines of sampler.tensor {width} do not fit on {gpus} GPUs; "
            "sharing a GPU is supported for sampler.tensor 1 and at most one engine per trainer rank"
        )
    share = config.sampler.gpu_memory_utilization
    bundles = [{"CPU": 2.0, "GPU": 1.0}] * ranks
    return Plan(bundles, list(range(ranks)), list(range(engines)), round(1 - share, 4), share, 1, 4)


def start_ray(config: RunConfig) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a local one.

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
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, OSError) as error:
        where = f"RAY_ADDRESS is '{address}', but no Ray cluster answers there" if address else "Ray did not start"
        raise WorkerError(f"{where}: {error}") from error


def reserve(plan: Plan) -> PlacementGroup:
    """Reserve the bundles, as close together as they fit.

    Raises:
        WorkerError: the cluster cannot hold them.
    """
    group = placement_group(plan.bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        have = ray.cluster_resources()
        raise WorkerError(
            f"Ray cannot place {len(plan.bundles)} bundles {plan.bundles[0]} ... within {PLACEMENT_SECONDS} s; the "
            f"cluster has {have.get('CPU', 0):.0f} CPUs and {have.get('GPU', 0):.0f} GPUs"
        ) from None
    return group


def options(group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
    """Actor options that put it into a bundle; it is never restarted, since its state would be lost."""
    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
