# SPDX-License-Identifier: Apache-2.0
"""Check that every transport brings every bit to every receiver, and that a failure at one end raises at the other."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from megarl.checkpoint_engine.base import Link, open_receiver, open_sender
from megarl.checkpoint_engine.buckets.stream import Inbox, Outbox, is_finite, plan_of
from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.transports.shm_folders import ROOT, remove_stale
from megarl.checkpoint_engine.wire import Book
from megarl.errors import ConfigError, WeightSyncError

RECEIVERS = 2
# Those that a host without GPUs has.
HERE = ["shm", "gloo", "ipc"]


def weights() -> list[tuple[str, torch.Tensor]]:
    """Return all dtypes, odd sizes, an empty and a non-contiguous tensor, bit patterns that arithmetic would change."""
    torch.manual_seed(0)
    bits = torch.randint(0, 2**16, (1001,), dtype=torch.int32).to(torch.int16)
    return [
        ("fp32", torch.randn(37, 5)),
        ("bf16", bits.view(torch.bfloat16)),
        ("fp16", bits[:99].view(torch.float16)),
        ("transposed", torch.randn(300, 70).t()),
        ("scalar", torch.tensor(-0.0)),
        ("empty", torch.empty(0, 4)),
        ("large", torch.randn(60_000)),
    ]


def receive(endpoint: dict, index: int) -> tuple[dict[str, torch.Tensor], object]:
    receiver = open_receiver(endpoint, index)
    try:
        inbox = Inbox(receiver, index, Book())
        tensors = {name: tensor.clone() for name, tensor in inbox.tensors()}
        finished = inbox.finish()
        if receiver.stays:
            receiver.answer(finished[1].to_bytes())
        return tensors, finished
    except WeightSyncError as error:
        receiver.fail(str(error))
        raise
    finally:
        receiver.close()


def transfer(
    transport: str, timeout: float = 20.0, receivers: int = RECEIVERS, joined: int | None = None, kind="adapter"
):
    """Send to receivers in threads; return the sender's future and theirs."""
    sender = open_sender(transport, Link(receivers, timeout))
    pool = ThreadPoolExecutor(receivers + 1)
    endpoint = sender.endpoint()
    arrived = [pool.submit(receive, endpoint, index) for index in range(receivers if joined is None else joined)]
    plan = plan_of(weights(), {"r": 1}, 4096) if kind == "adapter" else None
    sent: Future = pool.submit(Outbox(sender, 4096).send, weights(), 7, kind, plan)
    return sender, sent, arrived


@pytest.mark.parametrize("kind", ["adapter", "base"])
@pytest.mark.parametrize("transport", HERE)
def test_every_bit_reaches_every_receiver(transport: str, kind: str) -> None:
    sender, sent, arrived = transfer(transport, kind=kind)
    manifest = sent.result(30)
    # An adapter's tensors travel whole, those of the base in parts that a bucket can hold.
    sizes = [place.nbytes for place in manifest.tensors.places]
    assert (max(sizes) <= 4096) == (kind == "base") and manifest.tensors.count == len(weights())
    if sender.stays:
        assert [Receipt.from_bytes(data).receiver for data in sender.receipts()] == [0, 1]
    for index, future in enumerate(arrived):
        tensors, (received, receipt) = future.result(30)
        assert received == manifest and receipt.receiver == index
        receipt.check(manifest.receipt)
        for name, tensor in weights():
            assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), raw), name
    sender.close()
    sender.close()


@pytest.mark.parametrize("transport", HERE)
def test_a_receiver_that_never_comes_is_a_sync_error_within_the_timeout(transport: str) -> None:
    started = time.monotonic()
    sender, sent, arrived = transfer(transport, timeout=1.0, joined=1)
    with pytest.raises(WeightSyncError):
        sent.result(20)
    sender.close()
    with pytest.raises(WeightSyncError):
        arrived[0].result(20)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("transport", HERE)
def test_a_receivers_failure_reaches_the_sender_with_its_reason(transport: str) -> None:
    sender = open_sender(transport, Link(1, 20.0))

    def fail() -> None:
        receiver = open_receiver(sender.endpoint(), 0)
        receiver.take()
        receiver.fail("no room on the moon")

    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(fail)
        with pytest.raises(WeightSyncError, match="no room on the moon"):
            for _ in range(200):
                buffer = sender.buffer(1 << 16)
                sender.put(b"[]", buffer)
        failed.result(10)
    sender.close()


@pytest.mark.parametrize("transport", HERE)
def test_no_default_process_group_is_touched(transport: str) -> None:
    sender, sent, arrived = transfer(transport, receivers=1)
    sent.result(30), arrived[0].result(30)
    sender.close()
    assert not torch.distributed.is_initialized()


def test_an_unknown_transport_names_the_known_ones() -> None:
    known = r"unknown transport 'shn'; did you mean 'shm'\? \(known: gloo, hccl, ipc, nccl, shm\)"
    with pytest.raises(ConfigError, match=known):
        open_sender("shn", Link(1, 1.0))


def test_a_dtype_that_is_not_a_weights_is_refused_by_name() -> None:
    sender = open_sender("shm", Link(1, 1.0))
    with pytest.raises(WeightSyncError, match="'ids' has dtype int64"):
        Outbox(sender, 1 << 20).send([("ids", torch.arange(3))], 0, "base")
    sender.close()


class TestShm:
    def test_at_most_two_buckets_exist_at_a_time(self) -> None:
        sender = open_sender("shm", Link(1, 20.0))
        folder = Path(sender.endpoint()["folder"])
        most = 0

        def watch() -> None:
            nonlocal most
            with contextlib.suppress(FileNotFoundError):
                while True:
                    most = max(most, sum(name.endswith(".data") for name in os.listdir(folder)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(1) as pool:
            arrived = pool.submit(receive, sender.endpoint(), 0)
            named = [(f"t{i}", torch.randn(1 << 16)) for i in range(20)]
            Outbox(sender, 1 << 18).send(named, 0, "base")
            arrived.result(20)
        sender.close()
        watcher.join()
        assert most == 2

    def test_another_host_is_refused(self) -> None:
        sender = open_sender("shm", Link(1, 1.0))
        with pytest.raises(WeightSyncError, match=r"another host than the trainer.*use transport 'gloo'"):
            open_receiver({**sender.endpoint(), "host": "elsewhere"}, 0)
        sender.close()

    def test_a_bucket_that_does_not_fit_is_an_error_and_no_bus_error(self) -> None:
        sender = open_sender("shm", Link(1, 1.0))
        with pytest.raises(WeightSyncError, match=r"cannot hold a bucket.*checkpoint_engine\.bucket_mib"):
            sender.buffer(1 << 45)
        sender.close()

    def test_a_killed_sender_is_noticed_and_cleaned_up_after(self) -> None:
        script = (
            "import sys, time\n"
            "from megarl.checkpoint_engine.base import Link, open_sender\n"
            "sender = open_sender('shm', Link(1, 60.0))\n"
            "sender.put(b'[]', sender.buffer(1000))\n"
            "print(sender.endpoint()['folder'], flush=True)\n"
            "time.sleep(60)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        mine = open_sender("shm", Link(1, 60.0))
        endpoint = {**mine.endpoint(), "folder": str(folder)}
        assert folder.is_dir() and folder.name not in remove_stale(), "a live sender's folder must stay"
        receiver = open_receiver(endpoint, 0)
        receiver.take()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(WeightSyncError, match="is gone before its transfer ended"):
            receiver.take()
        remove_stale()
        assert not folder.exists()
        assert Path(mine.endpoint()["folder"]).is_dir()
        mine.close()
        assert not list(ROOT.glob(f"*megarl-*-{os.getpid()}-*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(dtype, value):
    for size in (1, 7, 64, 4099):
        tensor = torch.randn(size).to(dtype)
        assert is_finite(tensor) and is_finite(tensor[:0])
        for place in {0, size // 2, size - 1}:
            broken = tensor.clone()
            broken[place] = value
            assert not is_finite(broken)


def test_gloo_listens_on_the_address_that_it_tells_and_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the host's name maps to loopback, as on Debian, torch's own choice cannot be reached from other hosts.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ports = psutil.Process().net_connections
    others, heard = {c.laddr for c in ports("tcp")}, set()  # others: of process groups that other tests have left
    for _ in range(2):
        sender, sent, arrived = transfer("gloo")
        while not sent.done():
            open_now = {c.laddr for c in ports("tcp") if c.status == psutil.CONN_LISTEN}
            heard |= {address.ip for address in open_now - others}
        sent.result(30)
        assert all(future.result(30) for future in arrived)
        sender.close()
    assert heard == {sender.endpoint()["host"]}


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_connection_that_stays_serves_one_transfer_after_the_other(transport: str) -> None:
    sender = open_sender(transport, Link(RECEIVERS, 20.0))
    outbox, book_of = Outbox(sender, 4096), [Book() for _ in range(RECEIVERS)]
    sizes: list[int] = []
    put = sender.put
    sender.put = lambda header, payload: sizes.append(len(header)) or put(header, payload)

    def serve(index: int) -> list[dict[str, torch.Tensor]]:
        receiver = open_receiver(sender.endpoint(), index)
        got = []
        for _ in range(5):
            inbox = Inbox(receiver, index, book_of[index])
            got.append(dict(inbox.tensors()))
            receiver.answer(inbox.finish()[1].to_bytes())
        receiver.close()
        return got

    plan = plan_of(weights(), {"r": 1}, 4096)
    with ThreadPoolExecutor(RECEIVERS) as pool:
        arrived = [pool.submit(serve, index) for index in range(RECEIVERS)]
        for version in range(5):
            changed = [(name, tensor + version) for name, tensor in weights()]
            outbox.send(changed, version, "adapter", plan)
            assert len(sender.receipts()) == RECEIVERS
        for future in arrived:
            for version, tensors in enumerate(future.result(20)):
                for name, tensor in weights():
                    torch.testing.assert_close(tensors[name], tensor + version, rtol=0, atol=0, equal_nan=True)
    sender.close()
    buckets = len(sizes) // 5
    assert buckets > 2 and sizes[buckets] < 0.3 * sizes[0], "metadata travels once"


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_receiver_that_dies_is_named_at_once(transport: str) -> None:
    sender, _, arrived = transfer(transport, receivers=1)
    arrived[0].result(20)
    sender.receipts()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="receiver 0 is gone"):
        Outbox(sender, 4096).send(weights(), 8, "base")
    assert time.monotonic() - began < 5
    sender.close()


def test_nobody_without_the_endpoints_token_is_a_receiver() -> None:
    sender = open_sender("ipc", Link(1, 1.0))
    receiver = open_receiver({**sender.endpoint(), "token": "0" * 32}, 0)
    with pytest.raises(WeightSyncError, match="receivers 0 did not connect in time"):
        sender.buffer(10)
    with pytest.raises(WeightSyncError, match="the sender is gone"):
        receiver.take()
    sender.close()


@pytest.mark.parametrize(("transport", "needs"), [("nccl", "needs GPUs"), ("hccl", "needs torch_npu")])
def test_transports_of_other_devices_say_what_they_need(transport: str, needs: str) -> None:
    with pytest.raises(WeightSyncError, match=needs):
        open_sender(transport, Link(1, 1.0))
