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


def objects_by_hosts() -> tuple[list[list[int]], bool, int]:
    """On each rank: what its data group exchanged, whether a group is made once, and how many are left at the end."""
    import torch.distributed as dist

    from megarl.config import ParallelConfig
    from megarl.parallel import groups as made
    from megarl.parallel.device import pick_device

    groups = made.init_groups(ParallelConfig(**LAYOUT), pick_device("cpu"))
    assert made.host_group(groups.data) is groups.data  # gloo's already
    backend, dist.get_backend = dist.get_backend, lambda group=None: "nccl"
    hosts = made.host_group(groups.data)
    once = made.host_group(groups.data) is hosts is not groups.data
    dist.get_backend = backend
    sent: list = [None, None]
    dist.all_gather_object(sent, [dist.get_rank()], group=hosts)
    made.destroy_groups()
    return sent, once, len(made._host_groups)


def test_objects_travel_in_a_group_of_the_same_ranks():
    for rank, (sent, once, left) in enumerate(run_ranks(objects_by_hosts, 4)):
        assert sent == [[rank % 2], [rank % 2 + 2]] and once and not left
