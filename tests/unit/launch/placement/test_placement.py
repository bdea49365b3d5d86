# SPDX-License-Identifier: Apache-2.0
"""Test placement with real Ray: four nodes of eight GPUs each, which exist only in Ray's bookkeeping."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from megarl.controller.actors.pulse import Watch
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.errors import ConfigError, LostError, NodeLostError, WorkerError
from megarl.launch.actors import check_shared
from megarl.launch.placement import ray_start
from megarl.launch.placement.places import Places
from megarl.launch.placement.plan import plan_placement
from tests.unit.launch.placement.test_plan import run


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    """Start a cluster, and join it through its head."""
    started = Cluster()
    try:
        for index in range(4):
            # Otherwise Ray would start a Python process for each of a node's CPUs.
            noticed = {
                "health_check_initial_delay_ms": 0,
                "health_check_period_ms": 500,
                "health_check_timeout_ms": 500,
            }
            head = {"_system_config": {"prestart_worker_first_driver": False, **noticed}, "include_dashboard": False}
            resources = {"num_cpus": 24, "num_gpus": 8, "object_store_memory": 80 * 2**20}
            started.add_node(**resources, **({} if index else head), wait=index == 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", started.address)
            ray_start.start_ray(run(), Path("/nowhere"))
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


@pytest.fixture
def cluster(machines: Cluster) -> str:
    """Return this process's node id."""
    return ray.get_runtime_context().get_node_id()


def nodes_of(places: Places) -> list[str]:
    """Return the nodes on which Ray has put the bundles."""
    node_of_bundle = {}
    for held in places._held:
        nodes = placement_group_table(held.group)["bundles_to_node_id"]
        node_of_bundle |= {bundle: nodes[index] for index, bundle in enumerate(held.bundles)}
    return [node_of_bundle[index] for index in range(len(node_of_bundle))]


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({"parallel__tensor": 8, "parallel__data": 3, "sampler__engines": 8}, 8),
        ({"parallel__tensor": 8, "parallel__data": 2, "sampler__engines": 2, "sampler__parallel__tensor": 8}, 8),
        ({"parallel__tensor": 4, "parallel__context": 2, "parallel__data": 2, "sampler__engines": 16}, 8),
        ({"parallel__tensor": 2, "parallel__data": 12, "sampler__engines": 4, "sampler__parallel__tensor": 2}, 2),
        ({"parallel__tensor": 4, "parallel__data": 1, "sampler__engines": 3, "sampler__parallel__tensor": 4}, 4),
        ({"parallel__tensor": 8, "parallel__pipeline": 4, "sampler__engines": 32, "sampler__share_gpus": True}, 8),
    ],
)
def test_every_bundle_is_where_the_plan_says(cluster: str, settings: dict[str, int], block: int) -> None:
    places = ray_start.place(run(**settings), seconds=20)
    try:
        nodes, plan = nodes_of(places), places.plan
        assert nodes == [node.id for node in plan.nodes]
        ranks = [nodes[bundle] for bundle in plan.trainer]
        assert ranks[0] == cluster
        assert all(len(set(ranks[first : first + block])) == 1 for first in range(0, len(ranks), block))
        assert actor_node(places, rank=len(ranks) - 1) == ranks[-1]
    finally:
        places.release()


def test_an_engine_of_several_gpus_gets_those_of_the_ranks_beside_it(cluster: str) -> None:
    settings = {"parallel__data": 6, "sampler__engines": 2, "sampler__parallel__tensor": 3, "sampler__share_gpus": True}
    places = ray_start.place(run(**settings), seconds=20)
    try:
        plan = places.plan
        ranks = ray.get(places.gpus(plan.trainer, plan.trainer_gpus), timeout=60)
        assert len(set(ranks)) == 6
        engines = [[plan.engine[index], *plan.beside(index)] for index in (0, 1)]
        assert engines == [[0, 1, 2], [3, 4, 5]]
        assert ray.get(places.gpus(engines[1], plan.engine_gpus), timeout=60) == ranks[3:]
        # While the ranks hold their share.
        options = places.options(plan.trainer[4], plan.trainer_gpus)
        holder = ray.remote(Rank).options(**options).remote(Path("/"))
        ray.get(holder.sees.remote("/"), timeout=60)
        assert ray.get(places.gpus([4], plan.engine_gpus), timeout=60) == [ranks[4]]
        ray.kill(holder)
    finally:
        places.release()


def actor_node(places: Places, rank: int) -> str:
    """Return the node on which an actor of a rank's bundle really runs."""
    task = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    plan = places.plan
    options = places.options(plan.trainer[rank], plan.trainer_gpus) | {"max_restarts": None}
    return ray.get(task.options(**{k: v for k, v in options.items() if v is not None}).remote())


def test_what_another_job_holds_is_waited_for_and_then_named(cluster: str) -> None:
    other = placement_group([{"GPU": 8}] * 2, bundle_label_selector=[{"ray.io/node-id": cluster}, {}])
    ray.get(other.ready(), timeout=20)
    with pytest.raises(WorkerError, match=r"other jobs hold what this run needs, for 2 s now: .*controller's node"):
        ray_start.place(run(parallel__tensor=8), seconds=2)
    remove_placement_group(other)
    places = ray_start.place(run(parallel__tensor=8), seconds=20)
    assert places.plan.with_controller and nodes_of(places)[0] == cluster
    places.release()


class Rank:
    """A rank that sees the files of one node."""

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def sees(self, path: str) -> bool:
        return (self.seen / Path(path).name).exists()


def test_a_node_that_does_not_see_the_run_folder_is_named(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "shared" / "step-000001").mkdir(parents=True)
    (tmp_path / "shared" / "config.yaml").touch()
    (tmp_path / "own").mkdir()
    config = run(parallel__tensor=8, parallel__data=2)
    plan = plan_placement(config, ray_start.cluster_nodes())
    actor = ray.remote(Rank).options(num_cpus=0)
    sees, blind = actor.remote(tmp_path / "shared"), actor.remote(tmp_path / "own")
    watch = Watch([], tmp_path / "logs", config.train.hang_seconds)

    def ranks(*actors: Any) -> TrainerGroup:
        return TrainerGroup(actors, watch, config.train)

    new, checkpoint = tmp_path / "shared" / "config.yaml", tmp_path / "shared" / "step-000001"
    check_shared(new, ranks(sees, blind), plan)
    with pytest.raises(ConfigError, match=r"rank 0 on .* does not see .*config.yaml'.*or start the run on a node"):
        check_shared(new, ranks(blind, sees), plan)
    check_shared(checkpoint, ranks(sees, sees), plan)
    with pytest.raises(ConfigError, match=r"rank 1 on .* does not see .*step-000001'.*or copy the checkpoint there"):
        check_shared(checkpoint, ranks(sees, blind), plan)
    watch.close()


def test_what_a_lost_node_held_is_moved_to_one_that_has_room_and_the_rest_is_left_alone(
    machines: Cluster, cluster: str
) -> None:
    places, said = ray_start.place(run(parallel__tensor=8, sampler__engines=8), seconds=20), list[str]()
    try:
        plan, before = places.plan, list(places._held)
        lost = plan.nodes[plan.engine[0]]
        assert lost.id != cluster and not plan.shares_gpus
        # Two other nodes are idle. One is busy for a while, and the other one too small.
        spare = [one.id for one in ray_start.cluster_nodes() if one.id not in (cluster, lost.id)]
        busy = placement_group([{"GPU": 1}] * 2, bundle_label_selector=[{"ray.io/node-id": one} for one in spare])
        ray.get(busy.ready(), timeout=20)
        machines.remove_node(next(one for one in machines.list_all_nodes() if one.node_id == lost.id), False)
        places._seconds = 1.0
        with pytest.raises(
            NodeLostError, match=r"no node with 8 CPUs and 8 GPUs free came .* 1 s \(train\.node_seconds"
        ):
            places.restore(plan.engine, said.append)
        with pytest.raises(LostError, match=r"sampler 0: the node .* is lost"):
            places.check({"trainer rank 0": plan.trainer[0], "sampler 0": plan.engine[0]})
        remove_placement_group(busy)
        places._seconds = 60.0
        places.restore([*plan.trainer, *plan.engine], said.append)
        moved = nodes_of(places)
        assert [moved[bundle] for bundle in plan.trainer] == [cluster] * 8 and places._held[0] is before[0]
        assert {moved[bundle] for bundle in plan.engine} <= set(spare)
        assert [one.id for one in places.plan.nodes] == moved
        assert "is lost: waiting for it, or another node with 8 CPUs and 8 GPUs free, 0 s of at most 1" in said[0]
        assert said[-1].endswith(f"takes the place of {lost.name}")
    finally:
        places.release()
