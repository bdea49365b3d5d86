# SPDX-License-Identifier: Apache-2.0
"""The weight path on a GPU: kernels against references, and a transfer by CUDA IPC between two processes."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

from megarl.checkpoint_engine.base import Link, open_sender  # noqa: E402
from megarl.checkpoint_engine.records import Receipt  # noqa: E402
from megarl.checkpoint_engine.stream import Outbox  # noqa: E402
from megarl.errors import WeightSyncError  # noqa: E402

# A receiver in another process: sums of what it got, or "failed" and exit.
CHILD = """
import json, sys, torch
from megarl.checkpoint_engine.base import open_receiver
from megarl.checkpoint_engine.stream import Inbox
from megarl.checkpoint_engine.wire import Book
receiver, book = open_receiver(json.loads(sys.argv[1]), 0), Book()
for _ in range(int(sys.argv[2])):
    inbox = Inbox(receiver, 0, book)
    for name, tensor in inbox.tensors():
        assert tensor.is_cuda
        print(name, float(tensor.double().sum()), flush=True)
    receiver.answer(inbox.finish()[1].to_bytes())
"""


def child(endpoint: dict, transfers: int) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, json.dumps(endpoint), str(transfers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_digests() -> None:
    from tests.helpers.weight_kernels import check_digests

    check_digests("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slots(dtype: torch.dtype) -> None:
    from tests.helpers.weight_kernels import check_slots

    check_slots("cuda", dtype, exact=True)


def test_another_process_reads_the_senders_memory_version_after_version() -> None:
    sender = open_sender("ipc", Link(1, 60.0))
    outbox = Outbox(sender, 1 << 20)
    weights = [(f"w{i}", torch.randn(3, 50_000, device="cuda").bfloat16()) for i in range(10)]
    process = child(sender.endpoint(), 3)
    expected = []
    for version in range(3):
        changed = [(name, tensor * (version + 1)) for name, tensor in weights]
        expected += [f"{name} {float(tensor.double().sum())}" for name, tensor in changed]
        manifest = outbox.send(changed, version, "base")
        [receipt] = sender.receipts()
        Receipt.from_bytes(receipt).check(manifest.receipt)
    output = process.communicate(timeout=60)[0]
    assert output.splitlines() == expected
    sender.close()


def test_a_receiver_that_is_killed_is_named() -> None:
    sender = open_sender("ipc", Link(1, 20.0))
    process = child(sender.endpoint(), 2)
    outbox = Outbox(sender, 1 << 20)
    outbox.send([("w", torch.ones(1000, device="cuda"))], 0, "base")
    sender.receipts()
    process.kill()
    process.wait()
    with pytest.raises(WeightSyncError, match="receiver 0 is gone"):
        outbox.send([("w", torch.ones(1000, device="cuda"))], 1, "base")
        sender.receipts()
    sender.close()
