# SPDX-License-Identifier: Apache-2.0
"""Plan the node of each trainer rank and each engine from the nodes' free GPUs. Pure arithmetic: no Ray.

Ranks that communicate most are adjacent (mcore's order), so blocks of consecutive ranks are kept inside one node:
tensor parallel groups always, context and expert parallel groups if they fit. Rank 0 writes the checkpoints and the
controller deletes old ones, so rank 0's block is placed on the controller's node if that has the GPUs (without GPUs:
the CPUs). All ranks of an engine belong to one vLLM on one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import ParallelConfig, RunConfig
from megarl.errors import ConfigError
from megarl.launch.placement.fit import block_sizes, fit


@dataclass(frozen=True)
class Node:
    """Usable resources of one node of the Ray cluster.

    Attributes:
        id: Ray's id of the node.
        name: host name and address, for messages.
        gpus, cpus: whole GPUs and CPUs, as Ray counts them.
        cores: number of cores of the host; on a small one Ray may count more CPUs.
    """

    id: str
    name: str
    gpus: int
    cpus: int
    cores: int


@dataclass(frozen=True)
class Plan:
    """Bundles of Ray resources and the actors that use them.

    Attributes:
        bundles: Ray resource bundles.
        nodes: the node of each bundle.
        trainer: bundle index of each trainer rank.
        engine: index of each sampler engine's bundle, the first one where it shares those of several ranks.
        trainer_gpus, engine_gpus: GPUs (or the share of one) that each trainer rank and each engine takes from its
            bundle.
        trainer_threads, engine_threads: number of CPU threads of each rank and each engine.
        idle_gpus: number of the cluster's GPUs that the run does not use.
        with_controller: True if rank 0 is on the controller's node.
        engine_width: number of consecutive bundles whose GPUs an engine uses.
    """

    bundles: list[dict[str, float]]
    nodes: list[Node]
    trainer: list[int]
    engine: list[int]
    trainer_gpus: float
    engine_gpus: float
    trainer_threads: int
    engine_threads: int
    idle_gpus: int
    with_controller: bool
    engine_width: int = 1

    @property
    def shares_gpus(self) -> bool:
        """True if engines are on the trainer's GPUs."""
        return 0 < self.trainer_gpus < 1

    def beside(self, engine: int) -> range:
        """Return the bundles whose GPUs an engine uses beside its own bundle's."""
        return range(self.engine[engine] + 1, self.engine[engine] + self.engine_width)

    @property
    def ranks_alone(self) -> bool:
        """True if all trainer ranks are on one node."""
        return len({self.nodes[bundle].id for bundle in self.trainer}) == 1

    @property
    def engines_apart(self) -> bool:
        """True if an engine is on another node than trainer rank 0."""
        return any(self.nodes[bundle].id != self.nodes[self.trainer[0]].id for bundle in self.engine)

    @property
    def engines_beside_ranks(self) -> bool:
        """True if every engine shares memory with a trainer rank: its GPU, or on CPUs its node's."""
        if self.trainer_gpus:
            return self.shares_gpus
        return {self.nodes[bundle].id for bundle in self.engine} <= {self.nodes[bundle].id for bundle in self.trainer}

    def describe(self) -> str:
        """Return one line per node with its ranks and engines, and lines about shared and idle GPUs."""
        lines = []
        for node in dict.fromkeys(self.nodes):
            ranks = [rank for rank, bundle in enumerate(self.trainer) if self.nodes[bundle] == node]
            engines = [index for index, bundle in enumerate(self.engine) if self.nodes[bundle] == node]
            held = [f"{kind} {_runs(numbers)}" for kind, numbers in (("ranks", ranks), ("engines", engines)) if numbers]
            lines.append(f"placement: {', '.join(held)} on {node.name}")
        if self.shares_gpus:
            taken = [range(bundle, bundle + self.engine_width) for bundle in self.engine]
            where = "; ".join(f"engine {index} those of ranks {_runs(ranks)}" for index, ranks in enumerate(taken))
            lines.append(f"placement: engines share the trainer's GPUs (sampler.share_gpus): {where}")
        if self.idle_gpus:
            lines.append(f"placement: {self.idle_gpus} GPUs stay idle")
        return "\n".join(lines)


def plan_placement(config: RunConfig, nodes: Sequence[Node]) -> Plan:
    """Place the run on the cluster's nodes.

    Without GPUs everything runs on CPUs, which trainer and sampler use in turns.

    Args:
        config: the run's config.
        nodes: the cluster's nodes: the controller's first, the others in any order.

    Raises:
        ConfigError: the nodes cannot hold the run. The message says what is missing and what to change.
    """
    ranks, engines, width = config.parallel.world_size, config.sampler.engines, config.sampler.parallel.tensor
    gpus = 0 if config.train.device == "cpu" else sum(node.gpus for node in nodes)
    if not gpus:
        if config.train.device == "cuda":
            raise ConfigError("train.device is 'cuda', but Ray sees no GPU; set train.device=cpu, or add GPU nodes")
        return _on_cpus(config, nodes)
    _check_widths(config, nodes)
    first = nodes[0] if nodes[0].gpus >= block_sizes(config.parallel)[-1] else None
    nodes = sorted(nodes, key=lambda node: (node is not first, -node.gpus))
    slots = [node.gpus for node in nodes]
    if not _shares(config, gpus):
        counts = _assign(config.parallel, slots, width, engines, first is not None)
        bundles = [{"CPU": 1.0, "GPU": 1.0}] * ranks + [{"CPU": 1.0, "GPU": float(width)}] * engines
        bundle_nodes = _expand(nodes, counts[0]) + _expand(nodes, counts[1])
        engine, trainer_gpus, engine_gpus, across = list(range(ranks, ranks + engines)), 1.0, float(width), 1
    else:
        bundle_nodes = _expand(nodes, _assign(config.parallel, slots, 1, 0, first is not None)[0])
        bundles = [{"CPU": 2.0, "GPU": 1.0}] * ranks
        engine, across = _seats(bundle_nodes, width, engines), width
        engine_gpus = config.sampler.gpu_memory_utilization
        trainer_gpus = round(1 - engine_gpus, 4)
    idle = gpus - round(sum(bundle["GPU"] for bundle in bundles))
    plan = Plan(
        bundles, bundle_nodes, list(range(ranks)), engine, trainer_gpus, engine_gpus, 1, 4, idle, first is not None,
        across,
    )  # fmt: skip
    _check_cpus(plan)
    return plan


def _assign(
    parallel: ParallelConfig, slots: Sequence[int], width: int, engines: int, with_controller: bool
) -> tuple[list[int], list[int]]:
    """Return ranks per node and engines per node.

    Raises:
        ConfigError: they cannot be placed.
    """
    ranks, sizes = parallel.world_size, block_sizes(parallel)
    for size in sizes:
        counts = fit(slots, size, ranks // size, width, engines, int(with_controller))
        if counts is not None:
            return [blocks * size for blocks in counts[0]], counts[1]
    beside = f" and {engines} engines of sampler.parallel.tensor {width}" if engines else ""
    raise ConfigError(
        f"{ranks // sizes[-1]} x {sizes[-1]} trainer ranks (parallel.tensor, expert_tensor){beside} do not fit into "
        f"nodes with {', '.join(map(str, slots))} free places, none of them split over nodes and rank 0 with the "
        "controller (on the first); change parallel.tensor, sampler.parallel.tensor or sampler.engines, or add nodes"
    )


def _on_cpus(config: RunConfig, nodes: Sequence[Node]) -> Plan:
    ranks, engines = config.parallel.world_size, config.sampler.engines
    total = sum(node.cpus for node in nodes)
    if total < ranks + engines:
        raise ConfigError(
            f"{ranks} trainer ranks and {engines} engines need {ranks + engines} CPUs, Ray sees {total} free ones; "
            "make the layout smaller or add nodes"
        )
    first = nodes[0] if nodes[0].cpus >= block_sizes(config.parallel)[-1] else None
    nodes = sorted(nodes, key=lambda node: (node is not first, -node.cpus))
    for_ranks, for_engines = _assign(config.parallel, [node.cpus for node in nodes], 1, engines, first is not None)
    return Plan(
        bundles=[{"CPU": 1.0}] * (ranks + engines),
        nodes=_expand(nodes, for_ranks) + _expand(nodes, for_engines),
        trainer=list(range(ranks)),
        engine=list(range(ranks, ranks + engines)),
        trainer_gpus=0,
        engine_gpus=0,
        trainer_threads=_threads(nodes, for_ranks),
        engine_threads=_threads(nodes, for_engines),
        idle_gpus=0,
        with_controller=first is not None,
    )


def _threads(nodes: Sequence[Node], counts: Sequence[int]) -> int:
    """Return the least number of CPUs per process, for ``counts[n]`` processes on node n; the others wait for these."""
    return max(1, min(node.cores // count for node, count in zip(nodes, counts, strict=True) if count))


def _shares(config: RunConfig, gpus: int) -> bool:
    """Return True if engines use the trainer's GPUs.

    Raises:
        ConfigError: there are too few GPUs, and sharing is not requested.
    """
    ranks, engines, width = config.parallel.world_size, config.sampler.engines, config.sampler.parallel.tensor
    share, wanted = config.sampler.share_gpus, ranks + engines * width
    if gpus < ranks:
        raise ConfigError(
            f"parallel.tensor x pipeline x context x data needs {ranks} GPUs, Ray sees {gpus}; "
            "make the layout smaller or add nodes"
        )
    if share is None:
        share = gpus == ranks
    if not share:
        if gpus < wanted:
            fewer, idle = (gpus - ranks) // width, gpus - ranks
            fit = f"sampler.engines={fewer}, or " if fewer else ""
            raise ConfigError(
                f"{ranks} trainer ranks and {engines} engines of sampler.parallel.tensor {width} need {wanted} GPUs, "
                f"Ray sees {gpus}; set {fit}sampler.share_gpus=true, which puts "
                f"the engines on the trainer's {ranks} GPUs{f' and leaves {idle} idle' if idle else ''}"
            )
        if config.sampler.sleep:
            raise ConfigError(
                f"sampler.sleep is true, but the engines have GPUs of their own ({gpus} for {ranks} trainer ranks); "
                "set sampler.share_gpus=true, or sampler.sleep=false"
            )
    return share


def _seats(ranks: Sequence[Node], width: int, engines: int) -> list[int]:
    """Spread engines over the trainer's GPUs; return the first rank of each engine.

    Args:
        ranks: the node of each rank's GPU.
        width: GPUs of an engine: those of so many consecutive ranks of one node, which no other engine uses.
        engines: number of engines.

    Raises:
        ConfigError: the ranks have too few GPUs.
    """
    seats, rank = list[int](), 0
    while rank + width <= len(ranks):
        together = ranks[rank] == ranks[rank + width - 1]
        seats += [rank] if together else []
        rank += width if together else 1
    if engines > len(seats):
        raise ConfigError(
            f"{engines} engines of sampler.parallel.tensor {width} cannot share the GPUs of {len(ranks)} trainer "
            f"ranks: each needs those of {width} ranks of one node, with no other engine on them, so at most "
            f"{len(seats)} fit; set sampler.engines or sampler.parallel.tensor lower, or parallel.data higher"
        )
    return [seats[index * len(seats) // engines] for index in range(engines)]


def _check_widths(config: RunConfig, nodes: Sequence[Node]) -> None:
    """Refuse groups that no node can hold."""
    largest = max(node.gpus for node in nodes)
    for name, size in (
        ("sampler.parallel.tensor", config.sampler.parallel.tensor),
        ("parallel.tensor", config.parallel.tensor),
        ("parallel.expert_tensor", config.parallel.expert_tensor),
    ):
        if size > largest:
            raise ConfigError(f"{name} is {size}, but no node has more than {largest} GPUs; it must fit in a node")


def _check_cpus(plan: Plan) -> None:
    """Check that each actor gets one CPU of its node."""
    for node in dict.fromkeys(plan.nodes):
        bundles = [bundle for bundle, at in zip(plan.bundles, plan.nodes, strict=True) if at == node]
        needed = round(sum(bundle["CPU"] for bundle in bundles))
        if needed > node.cpus:
            raise ConfigError(
                f"{needed} trainer ranks and engines need a CPU each on {node.name}, Ray sees {node.cpus}"
            )


def _expand(nodes: Sequence[Node], counts: Sequence[int]) -> list[Node]:
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def _runs(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: ``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
