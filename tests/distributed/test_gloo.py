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


def objects_by_hosts(layouts: list[dict[str, int]]) -> list[tuple[list, list]]:
    """On each rank, at layouts one after the other: what the groups for objects exchanged, beside data and pipeline."""
    import datetime
    import time

    import torch.distributed as dist

    from megarl.config import ParallelConfig
    from megarl.parallel import groups as made
    from megarl.parallel.device import pick_device

    found, backend = [], dist.get_backend
    for layout in layouts:
        groups = made.init_groups(ParallelConfig(**layout), pick_device("cpu"))
        assert made.host_group(groups.data_context) is groups.data_context  # gloo's already
        time.sleep(0.2 * dist.get_rank())
        made._make_host_groups(groups.topology, datetime.timedelta(seconds=20))
        dist.get_backend = lambda group=None: "nccl"
        sent = []
        # As in a step: the last stage's ranks first.
        for group in [groups.data_context] * groups.last_stage + [groups.pipeline]:
            hosts, answers = made.host_group(group), [None] * group.size()
            assert (hosts is group) == (group.size() == 1)
            dist.all_gather_object(answers, dist.get_rank(), group=hosts)
            sent.append((answers, dist.get_process_group_ranks(group)))
        dist.get_backend = backend
        found += sent
        made.leave_layout()
        assert not made._host_groups
    made.destroy_groups()
    return found


def test_objects_travel_in_groups_of_the_same_ranks():
    layouts = [{"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"data": 2, "context": 2}, {"data": 2, "pipeline": 2}]
    for found in run_ranks(objects_by_hosts, 4, [*layouts, *layouts]):
        assert len(found) > len(layouts) and all(sent == ranks for sent, ranks in found)
