# SPDX-License-Identifier: Apache-2.0
"""A stand-in job: run a task pinned to each node of the cluster, print what it saw, exit with the given status."""

import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=1)
def where() -> str:
    return ray.get_runtime_context().get_node_id()


def main() -> int:
    ray.init(logging_level="ERROR", log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    pinned = [where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    ran_on = ray.get([task.remote() for task in pinned])
    print(f"nodes={len(nodes)} pinned={ran_on == nodes} arguments={sys.argv[2:]}")
    return int(sys.argv[1])


if __name__ == "__main__":
    raise SystemExit(main())
