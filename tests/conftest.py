# SPDX-License-Identifier: Apache-2.0
"""Settings that all tests share."""

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# No test asks a hub on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: the time of an example depends more on the machine's other work than on the code.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")


# What makes a process a rank. accelerate adds the local size, and then makes a group of its own.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module", autouse=True)
def _no_rank_after_the_file() -> Iterator[None]:
    """Destroy the process groups that a file's tests made, and forget which rank this process was.

    ``build_model`` makes a process the only rank, and it remains so. The next file of the process starts anew.
    """
    before = {name: os.environ[name] for name in OF_A_RANK if name in os.environ}
    yield
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        from megarl.parallel.groups import destroy_groups

        destroy_groups()
    for name in OF_A_RANK:
        os.environ.pop(name, None)
    os.environ.update(before)
