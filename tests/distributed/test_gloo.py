# SPDX-License-Identifier: Apache-2.0
"""Give each process group on CPUs one worker, so that no two of its collectives end at once."""

from tests.helpers.ranks import run_ranks

LAYOUT = {"tensor": 2, "data": 2, "sequence": True}


def workers_and_groups() -> tuple[int, int]:
    """On each rank, return gloo's worker threads in this process, and the number of its groups."""
    from pathlib import Path

    import torch.distributed as dist

    from megarl.config import ParallelConfig
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    init_groups(ParallelConfig(**LAYOUT), pick_device("cpu"))
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    workers = sum(name.startswith("pt_gloo_runloop") for name in names)
    destroy_groups()
    return workers, len(groups)


def test_a_group_has_one_worker():
    for workers, groups in run_ranks(workers_and_groups, 4):
        assert workers == groups > 5
