# SPDX-License-Identifier: Apache-2.0
"""Hold the bundles of a run on their nodes, and move those of a lost node to one that is there.

Every node's bundles are a placement group of their own. A lost node therefore touches nothing on the others, and its
bundles can be reserved again on a node that Ray knows by another id: also a node that came back gets a new one.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.errors import LostError, NodeLostError, WorkerError
from megarl.launch.placement.plan import Node, Plan
from megarl.launch.placement.ray_nodes import cluster_nodes, free_resources

POLL_SECONDS = 1.0
# Seconds between two words about a node that is waited for.
SAY_SECONDS = 20.0
# Seconds in which a node that is there runs a task that does nothing, and reserves free resources.
ANSWER_SECONDS = 10.0
RESERVE_SECONDS = 20.0


@dataclass(frozen=True)
class Held:
    """The bundles of one node: Ray's group, and the plan's index of each of its bundles."""

    group: PlacementGroup
    bundles: tuple[int, ...]

    def release(self) -> None:
        """Give the resources back."""
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self.group)


class Places:
    """The reserved bundles of a plan. Any thread may use it.

    Attributes:
        plan: where the bundles are now.
    """

    def __init__(self, plan: Plan, held: Sequence[Held], seconds: float) -> None:
        """
        Args:
            plan: the plan.
            held: all of its bundles.
            seconds: ``train.node_seconds``.
        """
        self.plan, self._held, self._seconds = plan, list(held), seconds
        self._lock, self._end = threading.Lock(), threading.Event()

    def options(self, bundle: int, gpus: float) -> dict[str, Any]:
        """Return actor options that place it into a bundle. Ray never restarts it: its state would be lost."""
        return {"max_restarts": 0} | self._within(bundle, gpus)

    def gpus(self, bundles: Sequence[int], share: float) -> list[Any]:
        """Return a reference to the name of each bundle's GPU, as CUDA_VISIBLE_DEVICES has it on its node.

        Args:
            bundles: of one GPU each.
            share: of the GPU that is free; a task takes it for a moment.
        """
        ask = ray.remote(max_retries=0)(_gpu)
        return [ask.options(**self._within(bundle, share)).remote() for bundle in bundles]

    def check(self, bundles: Mapping[str, int]) -> None:
        """Raise ``LostError`` if Ray has lost the node of a participant that is being started.

        Args:
            bundles: participant's name -> its bundle.
        """
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if lost := [name for name, bundle in bundles.items() if self.plan.nodes[bundle].id not in living]:
            node = self.plan.nodes[bundles[lost[0]]].name
            raise LostError.of(lost, f"{', '.join(lost)}: the node {node} is lost")

    def restore(self, bundles: Sequence[int], say: Callable[[str], None]) -> None:
        """Return once the nodes of these bundles are there; a lost node's bundles are moved to another one.

        Args:
            bundles: that are needed.
            say: tells what is waited for.

        Raises:
            NodeLostError: no node could hold them within ``train.node_seconds``.
        """
        for bundle in bundles:
            if self._answers(self.plan.nodes[bundle]):
                continue
            # Two actors of a lost node: the first one's thread moves the bundles of both.
            with self._lock:
                node = self.plan.nodes[bundle]
                if not self._answers(node):
                    self._move(self._of(bundle), node, say)

    def end_waits(self) -> None:
        """Wait for no node any more."""
        self._end.set()

    def release(self) -> None:
        """Give all resources back."""
        for held in self._held:
            held.release()

    def _within(self, bundle: int, gpus: float) -> dict[str, Any]:
        """Return options of an actor or a task that place it into a bundle."""
        held = self._of(bundle)
        place = PlacementGroupSchedulingStrategy(held.group, held.bundles.index(bundle))
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": place}

    def _of(self, bundle: int) -> Held:
        return next(held for held in self._held if bundle in held.bundles)

    def _answers(self, node: Node) -> bool:
        """Return True if a node is there. Ray itself takes up to half a minute to see that one is lost."""
        if node.id == ray.get_runtime_context().get_node_id():
            return True
        if node.id not in {one["NodeID"] for one in ray.nodes() if one["Alive"]}:
            return False
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        with contextlib.suppress(Exception):
            answer = ray.remote(_nothing).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
            return bool(ray.wait([answer], timeout=ANSWER_SECONDS)[0]) and ray.get(answer)
        return False

    def _move(self, held: Held, lost: Node, say: Callable[[str], None]) -> None:
        """Reserve the bundles of a lost node on one that is there; the lock is held."""
        wanted = [self.plan.bundles[bundle] for bundle in held.bundles]
        cpus, gpus = (sum(one.get(name, 0.0) for one in wanted) for name in ("CPU", "GPU"))
        needed = f"{cpus:.0f} CPUs" + (f" and {gpus:.0f} GPUs" if gpus else "")
        began, said = time.monotonic(), 0.0
        while not self._end.is_set():
            waited = time.monotonic() - began
            if waited >= self._seconds:
                raise NodeLostError(
                    f"the node {lost.name} is lost, and no node with {needed} free came in its place within "
                    f"{self._seconds:g} s (train.node_seconds)"
                )
            if not said or time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                say(
                    f"the node {lost.name} is lost: waiting for it, or another node with {needed} free, {waited:.0f} s "
                    f"of at most {self._seconds:g} (train.node_seconds)"
                )
            for node in cluster_nodes(free_resources()):
                fits = node.id != lost.id and node.cpus >= cpus and node.gpus >= gpus
                if fits and self._answers(node) and self._reserved(held, node, wanted):
                    say(f"{node.name} takes the place of {lost.name}")
                    return
            if self._answers(lost):  # it was only cut off for a while
                return
            self._end.wait(POLL_SECONDS)
        raise NodeLostError(f"the node {lost.name} is lost, and the run ends")

    def _reserved(self, held: Held, node: Node, wanted: Sequence[Mapping[str, float]]) -> bool:
        """Hold bundles on another node, if it still has room for them."""
        try:
            [group] = grouped([(node, wanted)], RESERVE_SECONDS)
        except WorkerError:
            return False
        held.release()
        self._held[self._held.index(held)] = Held(group, held.bundles)
        nodes = [node if index in held.bundles else one for index, one in enumerate(self.plan.nodes)]
        self.plan = replace(self.plan, nodes=nodes)
        return True


def reserve(plan: Plan, seconds: float) -> list[Held]:
    """Reserve each bundle on its node. Ray itself would choose the nodes, in any order.

    Raises:
        WorkerError: a node does not have the resources of the plan.
    """
    nodes = list(dict.fromkeys(plan.nodes))
    bundles = [tuple(index for index, at in enumerate(plan.nodes) if at == node) for node in nodes]
    wanted = [(node, [plan.bundles[index] for index in at]) for node, at in zip(nodes, bundles, strict=True)]
    try:
        groups = grouped(wanted, seconds)
    except WorkerError as error:
        raise WorkerError(f"{error}:\n{plan.describe()}") from error
    return [Held(group, at) for group, at in zip(groups, bundles, strict=True)]


def grouped(wanted: Sequence[tuple[Node, Sequence[Mapping[str, float]]]], seconds: float) -> list[PlacementGroup]:
    """Reserve bundles on their nodes; return a group for each node.

    Raises:
        WorkerError: a node does not have the resources; nothing is reserved then.
    """
    groups = []
    for node, bundles in wanted:
        selectors = [{"ray.io/node-id": node.id}] * len(bundles)
        groups.append(placement_group([dict(one) for one in bundles], strategy="PACK", bundle_label_selector=selectors))
    try:
        ray.get([group.ready() for group in groups], timeout=max(seconds, POLL_SECONDS))
    except ray.exceptions.GetTimeoutError:
        for group in groups:
            ray.util.remove_placement_group(group)
        raise WorkerError(f"Ray did not reserve this within {seconds:.0f} s") from None
    return groups


def _nothing() -> bool:
    return True


def _gpu() -> str:
    return str(ray.get_gpu_ids()[0])
