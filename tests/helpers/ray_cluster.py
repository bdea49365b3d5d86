# SPDX-License-Identifier: Apache-2.0
"""Start Ray for the actors of one test file."""

import os
import sys
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Run Ray in this host's processes, which import what this one does."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()
