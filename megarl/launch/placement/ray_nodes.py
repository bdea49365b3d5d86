# SPDX-License-Identifier: Apache-2.0
"""List the nodes of the Ray cluster, and what is free on them."""

import os
from collections.abc import Mapping

import ray

from megarl.launch.placement.plan import Node


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


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return node id -> Ray resources that nobody holds at present."""
    return ray._private.state.available_resources_per_node()
