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

from megarl.checkpoint_engine.base import TRANSPORTS, Link, open_receiver, open_sender
from megarl.checkpoint_engine.shm_folders import ROOT, remove_stale
from megarl.checkpoint_engine.stream import Inbox, is_finite, send_tensors
from megarl.errors import ConfigError, WeightSyncError

RECEIVERS = 2


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
        inbox = Inbox(receiver, index)
        tensors = {name: tensor.clone() for name, tensor in inbox}
        return tensors, inbox.finish()
    except WeightSyncError as error:
        receiver.fail(str(error))
        raise
    finally:
        receiver.close()


def transfer(transport: str, timeout: float = 20.0, receivers: int = RECEIVERS, joined: int | None = None):
    """Send to receivers in threads; return the sender's future and theirs."""
    sender = open_sender(transport, Link(receivers, timeout))
    pool = ThreadPoolExecutor(receivers + 1)
    endpoint = sender.endpoint()
    arrived = [pool.submit(receive, endpoint, index) for index in range(receivers if joined is None else joined)]
    arguments = {"version": 7, "kind": "adapter", "adapter_config": {"r": 1}, "bucket_bytes": 4096}
    sent: Future = pool.submit(send_tensors, sender, weights(), **arguments)
    return sender, sent, arrived


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_bit_reaches_every_receiver(transport: str) -> None:
    sender, sent, arrived = transfer(transport)
    manifest = sent.result(30)
    for index, future in enumerate(arrived):
        tensors, (received, receipt) = future.result(30)
        assert received == manifest and receipt.receiver == index
        receipt.check(manifest)
        for name, tensor in weights():
            assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), raw), name
    sender.close()
    sender.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_never_comes_is_a_sync_error_within_the_timeout(transport: str) -> None:
    started = time.monotonic()
    sender, sent, arrived = transfer(transport, timeout=1.0, joined=1)
    with pytest.raises(WeightSyncError):
        sent.result(20)
    sender.close()
    with pytest.raises(WeightSyncError):
        arrived[0].result(20)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("transport", TRANSPORTS)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_default_process_group_is_touched(transport: str) -> None:
    sender, sent, arrived = transfer(transport, receivers=1)
    sent.result(30), arrived[0].result(30)
    sender.close()
    assert not torch.distributed.is_initialized()


def test_an_unknown_transport_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown transport 'shn'; did you mean 'shm'\? \(known: gloo, shm\)"):
        open_sender("shn", Link(1, 1.0))


def test_a_dtype_that_is_not_a_weights_is_refused_by_name() -> None:
    sender = open_sender("shm", Link(1, 1.0))
    with pytest.raises(WeightSyncError, match="'ids' has dtype int64"):
        send_tensors(
            sender, [("ids", torch.arange(3))], version=0, kind="base", adapter_config=None, bucket_bytes=1 << 20
        )
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
            send_tensors(sender, named, version=0, kind="base", adapter_config=None, bucket_bytes=1 << 18)
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
        assert folder.name in remove_stale()
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
    heard: set = set()
    for _ in range(2):
        sender, sent, arrived = transfer("gloo")
        while not sent.done():
            heard |= {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        sent.result(30)
        assert all(future.result(30) for future in arrived)
        sender.close()
    assert heard == {sender.endpoint()["host"]}
