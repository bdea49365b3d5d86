# SPDX-License-Identifier: Apache-2.0
"""Memory that syncs take is what the GPUs say; a host that cannot say it is no error."""

import pytest
import torch

from megarl.bench.syncing.device_memory import DeviceMemory
from megarl.bench.syncing.report import sync_table
from megarl.bench.syncing.settings import SyncBenchSettings

ROW = {"kind": "adapter", "nbytes": 2**20, "tensors": 1, "ms": 1.0, "worst_ms": 2.0, "syncs": 3, "stages_ms": {}}


def test_the_growth_of_each_gpu_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: 10 * 2**20, 1: 5 * 2**20}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_memory_used", used.get)
    memory = DeviceMemory([0, 0, 1])
    used |= {0: 522 * 2**20}
    assert memory.grown() == {0: 512.0, 1: 0.0}
    settings = SyncBenchSettings(model="tiny").model_dump()
    row = ROW | {"memory_mib": memory.grown()}
    table = sync_table({"settings": settings, "transport": "nccl", "rows": [row], "ceilings": {"copy": 1.0}})
    assert "adapter: memory that the syncs took, MiB: GPU 0 512, GPU 1 0 (the trainer has" in table


def test_a_host_that_cannot_say_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(gpu: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceMemory([0]).grown() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_memory_used", missing)
    assert DeviceMemory([0]).grown() == {}
