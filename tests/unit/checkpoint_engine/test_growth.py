# SPDX-License-Identifier: Apache-2.0
"""Check that a buffer that makes way for a larger one is freed, though views of it were kept to fill it again."""

import psutil
import pytest
import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.buckets.stream import Outbox
from megarl.checkpoint_engine.transports.gloo import open_sender as open_gloo
from megarl.checkpoint_engine.transports.ipc import IpcSender
from megarl.checkpoint_engine.transports.live import DEPTH

BUCKETS, STEP = 12, 2**16


def growing() -> list[tuple[str, torch.Tensor]]:
    """Return tensors that each need a buffer of their own, a larger one than the tensor before."""
    return [(f"weight.{number}", torch.full((number * STEP // 4,), 1.0)) for number in range(1, BUCKETS + 1)]


def test_a_file_that_a_larger_one_replaces_is_removed_and_unmapped() -> None:
    sender = IpcSender(Link(0, 30.0))
    outbox = Outbox(sender, STEP)
    for _ in range(2):
        outbox.send(iter([(name, tensor.view(1, -1)) for name, tensor in growing()]), 0, "base")
        sender.receipts()
        assert sender._folder is not None
        files = {file.name for file in sender._folder.iterdir()} - {"lock"}
        maps = psutil.Process().memory_maps(grouped=False)
        mapped = [entry.path for entry in maps if str(sender._folder) in entry.path]
        assert files == {f"{number}.{(BUCKETS - 1 + number) * STEP}" for number in range(DEPTH)}
        assert len(mapped) == DEPTH and not any("deleted" in path for path in mapped)
    sender.close()


@pytest.mark.parametrize("open_sender", [IpcSender, open_gloo])
def test_no_more_buffers_are_viewed_than_there_are(open_sender: type[IpcSender]) -> None:
    sender = open_sender(Link(0, 30.0))
    outbox = Outbox(sender, STEP)
    outbox.send(iter([(name, tensor.view(1, -1)) for name, tensor in growing()]), 0, "base")
    sender.receipts()
    viewed = {address for address, _ in outbox._filler._views}
    assert viewed == {buffer.data_ptr() for buffer in sender._buffers if buffer is not None} and len(viewed) == DEPTH
    sender.close()
