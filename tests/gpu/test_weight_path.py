# SPDX-License-Identifier: Apache-2.0
"""The weight path on GPUs: kernels against references, transfers between processes by CUDA IPC and NCCL."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

from megarl.checkpoint_engine.base import Link, open_sender  # noqa: E402
from megarl.checkpoint_engine.buckets.stream import Outbox  # noqa: E402
from megarl.checkpoint_engine.records import Receipt  # noqa: E402
from megarl.errors import WeightSyncError  # noqa: E402

# A receiver in another process: sums of what it got, or "failed" and exit.
CHILD = """
import json, os, sys, time, torch
from megarl.checkpoint_engine.base import open_receiver
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.wire import Book
receiver, book = open_receiver(json.loads(sys.argv[1]), int(sys.argv[3])), Book()
for number in range(int(sys.argv[2])):
    inbox = Inbox(receiver, int(sys.argv[3]), book)
    for name, tensor in inbox.tensors():
        assert tensor.is_cuda
        print(name, float(tensor.double().sum()), flush=True)
        if number == int(sys.argv[4]):
            os.kill(os.getpid(), 9)
    receiver.answer(inbox.finish()[1].to_bytes())
"""
NEVER = -1
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# Transport, and the GPU of the receiver.
PATHS = [("ipc", 0), pytest.param("ipc", 1, marks=two_gpus), pytest.param("nccl", 1, marks=two_gpus)]


def child(endpoint: dict, transfers: int, gpu: int, index: int = 0, dies: int = NEVER) -> subprocess.Popen:
    """Start a receiver that sees one GPU only, and kills itself in a transfer."""
    command = [sys.executable, "-c", CHILD, json.dumps(endpoint), *map(str, (transfers, index, dies))]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_digests() -> None:
    from tests.helpers.weight_kernels import check_digests

    check_digests("cuda")


def test_digests_of_the_same_bucket_are_those_of_its_present_bytes() -> None:
    from megarl.checkpoint_engine.buckets.digests import RepeatedDigests, begin_digests
    from megarl.checkpoint_engine.wire import Place, Places

    places = Places([Place("a", "float32", (100,), 0, 0, 400), Place("b", "float32", (3, 5), 0, 512, 60)])
    payload, repeated, seen = torch.zeros(1024, dtype=torch.uint8, device="cuda"), RepeatedDigests(), set()
    for _ in range(4):
        payload.random_(0, 256)
        digests = repeated(payload, places)()
        repeated.capture()
        assert digests == begin_digests(payload, places)()
        seen.add(digests)
    assert len(seen) == 4


@pytest.mark.parametrize("inference", [False, True])
def test_kernels_are_replayed_with_their_result_whatever_mode_they_were_launched_in(inference: bool) -> None:
    from megarl.checkpoint_engine.kernels.replays import Replays

    numbers, launches, replays = torch.zeros(4, device="cuda"), [], Replays()

    def launch() -> torch.Tensor:
        launches.append(1)
        return numbers * 2

    for step in range(4):
        numbers.fill_(step)
        with torch.inference_mode(inference):  # as in a thread of an engine that takes an adapter
            assert replays.run("key", launch)().tolist() == [2.0 * step] * 4
        replays.capture()
    assert len(launches) == 2  # at first, and for the graph


@pytest.mark.parametrize(("transport", "gpu"), PATHS)
def test_tensors_that_stay_where_they_are_are_sent_with_their_present_values(transport: str, gpu: int) -> None:
    sender = open_sender(transport, Link(1, 60.0))
    outbox = Outbox(sender, 1 << 20)
    weights = tuple((f"w{i}", torch.empty(300, 500, device="cuda")) for i in range(30))
    process, expected = child(sender.endpoint(), 5, gpu), []
    for version in range(5):
        for _, tensor in weights:
            tensor.normal_()
        expected += [f"{name} {float(tensor.double().sum())}" for name, tensor in weights]
        manifest = outbox.send(weights, version, "base")
        [receipt] = sender.receipts()
        Receipt.from_bytes(receipt).check(manifest.receipt)
    assert process.communicate(timeout=60)[0].splitlines() == expected
    sender.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slots(dtype: torch.dtype) -> None:
    from tests.helpers.weight_kernels import check_copies, check_slots

    check_slots("cuda", dtype, exact=True)
    check_copies("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merged_weights(dtype: torch.dtype) -> None:
    from tests.helpers.weight_kernels import check_deferred, check_merge

    check_merge("cuda", dtype)
    check_deferred("cuda", dtype)


@pytest.mark.parametrize(("transport", "gpu"), PATHS)
def test_another_process_gets_the_senders_bytes_version_after_version(transport: str, gpu: int) -> None:
    sender = open_sender(transport, Link(1, 60.0))
    outbox = Outbox(sender, 1 << 20)
    # The last one is larger than a bucket.
    weights = [(f"w{i}", torch.randn(3 + 40 * (i == 29), 50_000, device="cuda").bfloat16()) for i in range(30)]
    process = child(sender.endpoint(), 3, gpu)
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


@pytest.mark.parametrize(("transport", "gpu"), PATHS)
@pytest.mark.parametrize("dies", [NEVER, 1])
def test_a_receiver_that_is_killed_is_named_at_once(transport: str, gpu: int, dies: int) -> None:
    """Killed between two transfers, or in the middle of one, where a broadcast would wait for it for ever."""
    sender = open_sender(transport, Link(1, 20.0))
    process = child(sender.endpoint(), 2, gpu, dies=dies)
    outbox = Outbox(sender, 1 << 20)
    large = [(f"w{i}", torch.ones(1 << 19, device="cuda")) for i in range(20)]
    outbox.send(large, 0, "base")
    sender.receipts()
    if dies == NEVER:
        process.kill()
        process.wait()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="receiver 0 is gone"):
        outbox.send(large, 1, "base")
        sender.receipts()
    assert time.monotonic() - began < 10
    sender.close()
    torch.cuda.synchronize()
    assert torch.ones(10, device="cuda").sum() == 10


def test_the_direct_loader_fills_parameters_on_the_gpu() -> None:
    from tests.unit.checkpoint_engine import test_direct as direct

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        loader = direct.make_loader(context, "cuda")
        for seed in (0, 1):
            given = {name: tensor.cuda() for name, tensor in direct.tensors(seed).items()}
            theirs = direct.Model().cuda()
            direct.load(loader, given, 200)
            theirs.load_weights(given.items())
            for mine, other in zip(loader._model.parameters(), theirs.parameters(), strict=True):
                assert mine.any() and torch.equal(mine, other)
