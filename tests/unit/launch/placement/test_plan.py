# SPDX-License-Identifier: Apache-2.0
"""Test placement as pure arithmetic, over many shapes of cluster and layout."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.launch.placement.fit import fit
from megarl.launch.placement.plan import Node, Plan, plan_placement
from megarl.parallel.topology import Topology


def run(**settings: Any) -> RunConfig:
    """Return a config with ``section__key`` settings. No model is read, so that only the layout matters."""
    sections: dict[str, Any] = {"model": {"path": "/"}, "task": {"name": "arithmetic"}}
    for key, value in settings.items():
        *path, name = key.split("__")
        place = sections
        for section in path:
            place = place.setdefault(section, {})
        place[name] = value
    parts = {
        name: RunConfig.model_fields[name].annotation.model_validate(sections.get(name, {}))  # type: ignore[union-attr]
        for name in RunConfig.model_fields
    }
    return RunConfig.model_construct(**parts)


def nodes(*gpus: int, cpus: int = 64) -> list[Node]:
    return [Node(f"id{i}", f"host{i}", count, cpus, cpus) for i, count in enumerate(gpus)]


def node_of(plan: Plan) -> list[str]:
    return [plan.nodes[bundle].id for bundle in plan.trainer]


def groups(topology: Topology, axes: tuple[str, ...]) -> list[list[int]]:
    """Return groups of ranks that differ only in the given dense axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        place = dict(zip(("tensor", "context", "data", "pipeline"), topology.coordinates(rank), strict=True))
        groups.setdefault(tuple(v for k, v in place.items() if k not in axes), []).append(rank)
    return list(groups.values())


def expert_groups(topology: Topology) -> list[list[int]]:
    """Return groups in mcore's order within a stage: expert-tensor fastest, then expert."""
    size = topology.expert * topology.expert_tensor
    return [list(range(first, first + size)) for first in range(0, topology.world_size, size)]


def together(plan: Plan, groups: list[list[int]]) -> bool:
    node_of_rank = node_of(plan)
    return all(len({node_of_rank[rank] for rank in group}) == 1 for group in groups)


def check(plan: Plan, cluster: list[Node], config: RunConfig) -> None:
    """Assert the properties of every plan."""
    used = Counter[str]()
    for bundle, node in zip(plan.bundles, plan.nodes, strict=True):
        used[node.id] += int(bundle["GPU"])
    assert all(used[node.id] <= node.gpus for node in cluster)
    topology = Topology.from_config(config.parallel)
    assert together(plan, groups(topology, ("tensor",)))
    assert len(plan.trainer) == topology.world_size and len(plan.engine) == config.sampler.engines
    assert plan.idle_gpus == sum(node.gpus for node in cluster) - sum(used.values())


def test_tensor_groups_of_a_full_cluster_lie_inside_nodes_and_rank_0_is_with_the_controller() -> None:
    config = run(parallel__tensor=8, parallel__data=3, sampler__engines=8)
    cluster = nodes(8, 8, 8, 8)
    plan = plan_placement(config, cluster)
    check(plan, cluster, config)
    assert node_of(plan) == ["id0"] * 8 + ["id1"] * 8 + ["id2"] * 8
    assert {plan.nodes[bundle].id for bundle in plan.engine} == {"id3"}
    assert plan.describe().splitlines()[3] == "placement: engines 0-7 on host3"


def test_every_layout_on_every_cluster_is_placed_whole_or_refused_by_name() -> None:
    clusters = [(8,), (4,), (8, 8), (4, 8), (8, 4), (6, 8, 3), (4, 4, 4, 4), (8, 8, 8, 8), (0, 8, 8), (2, 0, 8)]
    layouts = [(t, c, d, p) for t, c, d, p in itertools.product((1, 2, 4, 8), (1, 2), (1, 3), (1, 2))]
    placed = refused = 0
    for (t, c, d, p), engines, width in itertools.product(layouts, (1, 4), (1, 2, 8)):
        config = run(
            parallel__tensor=t, parallel__context=c, parallel__data=d, parallel__pipeline=p,
            sampler__engines=engines, sampler__parallel__tensor=width, sampler__share_gpus=False,
        )  # fmt: skip
        for sizes in clusters:
            cluster = nodes(*sizes)
            try:
                plan = plan_placement(config, cluster)
            except ConfigError as error:
                refused += 1
                assert "parallel.tensor" in str(error) or "sampler." in str(error), error
                continue
            placed += 1
            check(plan, cluster, config)
            # With the controller, if its node can hold the group.
            assert (plan.nodes[0].id == "id0") == plan.with_controller == (sizes[0] >= t)
            if all(size % (t * c) == 0 for size in sizes) and width == 1:
                assert together(plan, groups(Topology.from_config(config.parallel), ("tensor", "context")))
    assert placed > 300 and refused > 300


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({"tensor": 2, "expert": 8, "data": 8}, (8, 8)),
        ({"tensor": 1, "expert": 4, "expert_tensor": 2, "data": 16, "pipeline": 1}, (8, 8)),
        ({"tensor": 2, "context": 2, "expert": 4, "data": 3}, (8, 4)),
    ],
)
def test_expert_and_context_groups_stay_inside_nodes_where_they_fit(
    layout: dict[str, int], sizes: tuple[int, ...]
) -> None:
    config = run(**{f"parallel__{key}": value for key, value in layout.items()}, sampler__share_gpus=True)
    plan = plan_placement(config, nodes(*sizes))
    topology = Topology.from_config(config.parallel)
    assert together(plan, groups(topology, ("tensor", "context"))) and together(plan, expert_groups(topology))


def test_a_group_too_wide_for_a_node_is_split_between_tensor_groups_only() -> None:
    config = run(parallel__tensor=4, parallel__context=4, sampler__share_gpus=True)
    plan = plan_placement(config, nodes(8, 8))
    assert node_of(plan) == ["id0"] * 8 + ["id1"] * 8


def fits_by_trying(slots: tuple[int, ...], block: int, blocks: int, width: int, engines: int, on_first: int) -> bool:
    """Answer the same question by trying all ways to spread the blocks."""
    for counts in itertools.product(*(range(slot // block + 1) for slot in slots)):
        room = sum((slot - count * block) // width for slot, count in zip(slots, counts, strict=True))
        if sum(counts) == blocks and counts[0] >= on_first and room >= engines:
            return True
    return False


def test_a_way_is_found_wherever_there_is_one() -> None:
    results = []
    shapes = itertools.product(
        ((8, 8), (5, 8, 3), (4, 6, 6)), (1, 2, 3, 4), range(1, 7), (1, 2, 4, 5), (0, 1, 2, 3), (0, 1)
    )
    for slots, block, blocks, width, engines, on_first in shapes:
        answer = fit(slots, block, blocks, width, engines, on_first)
        results.append(answer is not None)
        assert results[-1] == fits_by_trying(slots, block, blocks, width, engines, on_first)
        if answer is None:
            continue
        taken, placed = answer
        assert (sum(taken), sum(placed)) == (blocks, engines) and taken[0] >= on_first
        assert all(b * block + e * width <= slot for b, e, slot in zip(taken, placed, slots, strict=True))
    assert 0.1 < sum(results) / len(results) < 0.95


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        (
            {"parallel__data": 6, "sampler__engines": 4},
            (8,),
            "6 trainer ranks and 4 engines of sampler.parallel.tensor 1 need 10 GPUs, Ray sees 8; set "
            "sampler.engines=2, or sampler.share_gpus=true, which puts the engines on the trainer's 6 GPUs and "
            "leaves 2 idle",
        ),
        ({"sampler__sleep": True, "parallel__data": 2}, (8,),
         r"the engines have GPUs of their own \(8 for 2 trainer ranks\)"),
        ({"sampler__parallel__tensor": 8}, (4, 4), "sampler.parallel.tensor is 8, but no node has more than 4 GPUs"),
        ({"parallel__tensor": 8}, (4, 4, 4), "parallel.tensor is 8, but no node has more than 4 GPUs"),
        ({"parallel__data": 9}, (8,), "needs 9 GPUs, Ray sees 8"),
        ({"parallel__tensor": 4, "parallel__data": 2, "sampler__parallel__tensor": 4}, (6, 6),
         r"2 x 4 trainer ranks .* and 1 engines of sampler.parallel.tensor 4 do not fit into nodes with 6, 6"),
        ({"parallel__data": 2, "sampler__engines": 4, "sampler__share_gpus": True}, (8,),
         "4 engines of sampler.parallel.tensor 1 cannot share the GPUs of 2 trainer ranks: .* so at most 2 fit; set"),
        ({"parallel__data": 3, "sampler__engines": 2, "sampler__parallel__tensor": 2, "sampler__share_gpus": True},
         (8,), "each needs those of 2 ranks of one node, with no other engine on them, so at most 1 fit"),
        ({"parallel__data": 6, "sampler__engines": 3, "sampler__parallel__tensor": 2, "sampler__share_gpus": True},
         (3, 3), "so at most 2 fit; set sampler.engines or sampler.parallel.tensor lower, or parallel.data higher"),
        ({"train__device": "cuda"}, (0,), "train.device is 'cuda', but Ray sees no GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_with_what_to_change(
    settings: dict[str, Any], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_placement(run(**settings), nodes(*sizes))


def test_engines_share_only_where_told_to_or_where_the_ranks_take_every_gpu() -> None:
    alone = plan_placement(run(parallel__data=1), nodes(1))
    assert alone.shares_gpus and (alone.trainer_gpus, alone.engine_gpus) == (0.6, 0.4)
    assert "engines share the trainer's GPUs" in alone.describe()
    assert not plan_placement(run(parallel__data=4, sampler__engines=4), nodes(8)).shares_gpus
    told = plan_placement(run(parallel__data=6, sampler__engines=3, sampler__share_gpus=True), nodes(8))
    assert told.engine == [0, 2, 4] and told.idle_gpus == 2
    assert "2 GPUs stay idle" in told.describe()
    with pytest.raises(ConfigError, match=r"need 9 GPUs, Ray sees 8; set sampler.share_gpus=true"):
        plan_placement(run(parallel__data=8, sampler__share_gpus=False), nodes(8))


@pytest.mark.parametrize(
    ("ranks", "engines", "width", "sizes", "expected"),
    [
        (2, 1, 2, (2,), [0]),
        (4, 2, 2, (4,), [0, 2]),
        (8, 2, 2, (8,), [0, 4]),
        (8, 1, 8, (8,), [0]),
        (6, 2, 2, (3, 3), [0, 3]),  # ranks 2 and 5 have no engine
        (8, 2, 4, (4, 4), [0, 4]),
    ],
)
def test_an_engine_of_several_gpus_shares_those_of_consecutive_ranks_of_one_node(
    ranks: int, engines: int, width: int, sizes: tuple[int, ...], expected: list[int]
) -> None:
    config = run(
        parallel__data=ranks, sampler__engines=engines, sampler__parallel__tensor=width, sampler__share_gpus=True
    )
    plan = plan_placement(config, nodes(*sizes))
    assert plan.shares_gpus and plan.engine == expected and len(plan.bundles) == ranks
    taken = [[plan.engine[engine], *plan.beside(engine)] for engine in range(engines)]
    assert [len(bundles) for bundles in taken] == [width] * engines
    assert all(len({plan.nodes[bundle].id for bundle in bundles}) == 1 for bundles in taken)
    assert len({bundle for bundles in taken for bundle in bundles}) == width * engines


def test_an_engine_with_gpus_of_its_own_uses_those_of_its_bundle_only() -> None:
    plan = plan_placement(run(parallel__data=2, sampler__engines=2, sampler__parallel__tensor=2), nodes(8))
    assert plan.engine_gpus == 2 and [list(plan.beside(engine)) for engine in (0, 1)] == [[], []]


def test_a_node_with_too_few_cpus_is_named() -> None:
    with pytest.raises(ConfigError, match=r"8 trainer ranks and engines need a CPU each on host0, Ray sees 4"):
        plan_placement(run(parallel__data=7), nodes(8, cpus=4))


def test_on_cpus_ranks_and_engines_take_turns_on_the_cores_of_a_node() -> None:
    nodes = [Node("id0", "host0", 0, 5, 2)]
    plan = plan_placement(run(parallel__data=2), nodes)
    assert (plan.trainer_threads, plan.engine_threads) == (1, 2)
    assert plan.trainer_gpus == plan.engine_gpus == 0 and math.isclose(plan.bundles[0]["CPU"], 1)
    with pytest.raises(ConfigError, match="need 6 CPUs, Ray sees 5"):
        plan_placement(run(parallel__data=5), nodes)
