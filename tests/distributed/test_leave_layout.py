# SPDX-License-Identifier: Apache-2.0
"""Take one set of processes through many layouts: the resources of a layout's groups are released."""

from tests.helpers.ranks import run_ranks

LAYOUTS = ({"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"context": 2})


def threads_after_each_layout() -> list[int]:
    """On each rank, return its number of threads after the groups of each layout have communicated."""
    import psutil
    import torch
    import torch.distributed as dist

    from megarl.config import ParallelConfig
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups, leave_layout

    counts = []
    for layout in LAYOUTS:
        leave_layout()
        groups = init_groups(ParallelConfig(**layout), pick_device("cpu"))
        total = torch.ones(1)
        dist.all_reduce(total, group=groups.data_context)
        assert total.item() == groups.data_context.size()
        counts.append(psutil.Process().num_threads())
    destroy_groups()
    return counts


def test_layouts_do_not_pile_up_threads():
    for counts in run_ranks(threads_after_each_layout, 2):
        assert max(counts) - min(counts) < 10, counts
