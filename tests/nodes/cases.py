# SPDX-License-Identifier: Apache-2.0
"""List what happens to runs over two nodes."""

from dataclasses import dataclass

# CPUs of the first node (the controller's) and of the second one. The two trainer ranks are one tensor-parallel group.
TRAINER_FIRST, ENGINE_FIRST = (2, 1), (1, 2)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: for the table and for filters.
        fault: what happens after a few steps: ``none``; ``lost``: the node loses power; ``cut``: it is off the network
            for a while; ``ray``: its Ray is killed; ``term``: the batch job gets SIGTERM.
        node: 0 or 1, which node.
        cpus: of both nodes, so where trainer and engine are.
        back: False if the node comes back only after the run has ended.
        slurm: True to start it by ``scripts/slurm.sbatch``, with stand-ins for Slurm's commands.
        settings: further settings.
        ends: text of the error that ends the run; empty if it goes on by itself. A run that ended is continued.
        restarts: of engines and trainers.
    """

    name: str
    fault: str = "none"
    node: int = 1
    cpus: tuple[int, int] = TRAINER_FIRST
    back: bool = True
    slurm: bool = False
    settings: tuple[str, ...] = ()
    ends: str = ""
    restarts: tuple[int, int] = (0, 0)


NOT_BACK = ("train.node_seconds=15",)
WAITED = "within 15 s (train.node_seconds)"
HEAD_GONE = "has not answered for 15 s; leaving"
CASES = [
    Case("by hand: nothing happens"),
    Case("by hand: engine's node loses power and comes back", "lost", restarts=(1, 0)),
    Case("by hand: engine's node loses power for good", "lost", back=False, settings=NOT_BACK, ends=WAITED),
    Case("by hand: engine's node is cut off for 12 s", "cut", restarts=(1, 0)),
    Case("by hand: Ray dies on the engine's node", "ray", restarts=(1, 0)),
    Case("by hand: trainer's node loses power and comes back", "lost", cpus=ENGINE_FIRST, restarts=(0, 1)),
    Case(
        "by hand: trainer's node loses power for good",
        "lost",
        cpus=ENGINE_FIRST,
        back=False,
        settings=NOT_BACK,
        ends=WAITED,
    ),
    Case("by hand: Ray dies on the trainer's node", "ray", cpus=ENGINE_FIRST, restarts=(0, 1)),
    Case("by hand: controller's node loses power", "lost", node=0, ends=HEAD_GONE),
    Case(
        "by hand: shm between nodes is refused",
        settings=("checkpoint_engine.transport=shm",),
        ends="checkpoint_engine.transport is 'shm', which stays on one host",
    ),
    Case("sbatch: SIGTERM before the time limit", "term", slurm=True, ends="queueing job 4711 again"),
    Case("sbatch: engine's node loses power", "lost", slurm=True, ends="srun: node 1 failed"),
    Case("sbatch: controller's node loses power", "lost", node=0, slurm=True, ends=HEAD_GONE),
]
