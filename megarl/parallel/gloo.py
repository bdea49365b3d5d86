# SPDX-License-Identifier: Apache-2.0
"""Register gloo with one worker per group as a backend of ``torch.distributed``.

torch gives a group two workers. Each stores the name of the collective that it finished in a string of the group,
without a lock (``ProcessGroupGloo::runLoop``, ``lastCompletedWorkName``; seen in 2.13). If two workers finish at once
and a name is longer than 15 characters, both free the same memory, and the process dies in a later ``malloc``.
Coalesced collectives, which mcore's overlapped gathers use, have such names. A single worker runs the collectives in
the order of their calls, as NCCL does.
"""

import os
from datetime import timedelta

import torch.distributed as dist

from megarl.network import LOOPBACK, gloo_devices

NAME = "megarl_gloo"


def register_gloo() -> str:
    """Register the backend and return its name for ``init_process_group``."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    return NAME


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = timeout
    toward = os.environ.get("MASTER_ADDR", LOOPBACK)
    options._devices = [dist.ProcessGroupGloo.create_device(**device) for device in gloo_devices(toward)]
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_sequence_number_for_group()
    return group
