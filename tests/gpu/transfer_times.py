# SPDX-License-Identifier: Apache-2.0
"""Time the transfer of a base between two GPUs by two bare processes, without a trainer or vLLM around it.

`python3 -m tests.gpu.transfer_times [SHAPE] [MIB,...] [rounds=N] [TRANSPORT,...]`: MIB are sizes of a bucket, and the
transports are `nccl` (default) and `ipc`. Prints the milliseconds of each transfer, of both sides' stages, and what the
GPUs did in one of them: seconds of each kernel, and the pauses between broadcasts. A broadcast of as many bytes is the
ceiling. It starts in seconds, so that a change of the weight path can be tried many times in one call.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megarl.bench.shapes import SHAPES
from megarl.bench.syncing.ceilings import broadcast_rate
from megarl.checkpoint_engine.base import Link, open_receiver, open_sender
from megarl.checkpoint_engine.buckets.filling import DTYPES, shape_of
from megarl.checkpoint_engine.buckets.stream import Inbox, Outbox
from megarl.checkpoint_engine.receiver.weights.bucket_writes import BucketWrites, write_transfer
from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.wire import Book, Places
from megarl.model.weights.sums import Deferred

TIMEOUT, SHOWN = 60.0, 8
# The transfer that is profiled at both ends.
PROFILED = 4


def tensors_of(shape: str) -> tuple[tuple[str, Deferred], ...]:
    """Return a shape's tensors on this process's GPU, with random values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape].config()), dtype=torch.bfloat16)
    found = []
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, dtype=torch.bfloat16, device="cuda")
        found.append((name, Deferred(value[None] if value.ndim == 2 else value[None, :, None], tuple(value.shape))))
    return tuple(found)


class Loader:
    """Writes buckets into tensors of this GPU, as `DirectLoader` does into vLLM's."""

    def __init__(self) -> None:
        self._writes: dict[Places, BucketWrites] = {}
        self._targets: list[torch.Tensor] = []  # the writes know only their addresses

    def take(self, inbox: Inbox) -> Any:
        """Receive one transfer; return its receipt."""
        return write_transfer(inbox, self._writes_of)[1]

    def _writes_of(self, places: Places) -> BucketWrites:
        if places not in self._writes:
            self._writes[places] = BucketWrites(places, [[self._write(place)] for place in places])
        return self._writes[places]

    def _write(self, place: Any) -> Write:
        dtype, (*rows, columns) = DTYPES[place.dtype], shape_of(place)
        shape = rows[0] if rows else 1, columns
        target = torch.empty(shape, dtype=dtype, device="cuda")
        self._targets.append(target)
        source = Source(place.bucket, dtype, place.offset // dtype.itemsize, shape, (columns, 1))
        return Write(place.name, target, source, 1.0)


def receive(endpoint: str) -> None:
    """Receive until the sender disconnects; print the stages of two transfers, and the kernels of one."""
    torch.cuda.set_device(1)
    receiver, book, loader = open_receiver(json.loads(endpoint), 0), Book(), Loader()
    count = 0
    while receiver.begins():
        count += 1
        inbox = Inbox(receiver, 0, book)
        with shown_kernels("receiver", count == PROFILED):
            receipt = loader.take(inbox)
        receiver.answer(receipt.to_bytes())
        if count in (2, PROFILED + 1):
            print("receiver", {name: round(1e3 * value, 2) for name, value in receipt.seconds.items()}, flush=True)


@contextmanager
def shown_kernels(side: str, wanted: bool) -> Iterator[None]:
    """Print what this process's GPU does meanwhile, if wanted."""
    if not wanted:
        yield
        return
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        yield
        torch.cuda.synchronize()
    print_kernels(side, seen)


def print_kernels(side: str, seen: Any) -> None:
    """Print the milliseconds of each kernel, and the pauses between broadcasts."""
    total: dict[str, list[float]] = defaultdict(list)
    broadcasts = []
    for event in seen.events():
        if event.device_type.name != "CUDA":
            continue
        begin, end = event.time_range.start, event.time_range.end
        total[event.name[:60]].append(end - begin)
        if "nccl" in event.name.lower():
            broadcasts.append((begin, end))
    for name, times in sorted(total.items(), key=lambda one: -sum(one[1]))[:SHOWN]:
        each = f"{len(times):4d}, median {statistics.median(times):7.1f} us"
        print(f"  {side}: {sum(times) / 1e3:8.2f} ms in {each}  {name}")
    if not broadcasts:
        return
    broadcasts.sort()
    pauses = sum(after[0] - before[1] for before, after in pairwise(broadcasts))
    whole = broadcasts[-1][1] - broadcasts[0][0]
    print(f"  {side}: broadcasts take {whole / 1e3:.2f} ms, of which {pauses / 1e3:.2f} ms are pauses", flush=True)


def measure(tensors: tuple, transport: str, mib: int, rounds: int) -> None:
    """Send the tensors again and again to a new process."""
    sender = open_sender(transport, Link(1, TIMEOUT))
    outbox = Outbox(sender, mib * 2**20)
    endpoint = json.dumps({"transport": transport, "stays": True} | sender.endpoint())
    child = subprocess.Popen([sys.executable, "-m", __spec__.name, "receive", endpoint])
    times = []
    for version in range(1, max(rounds, PROFILED + 2) + 1):
        torch.cuda.synchronize()
        time.sleep(0.02)
        began = time.perf_counter()
        outbox.stages.begin()
        with shown_kernels("sender", version == PROFILED):
            outbox.send(tensors, version, "base")
            outbox.stages.end("wire")
            sender.receipts()
            outbox.stages.end("receipts")
        if version != PROFILED:
            times.append(1e3 * (time.perf_counter() - began))
    stages = outbox.stages.seconds
    print("sender", {name: round(1e3 * value, 2) for name, value in stages.items()})
    print(
        f"{transport}, {mib} MiB: median {statistics.median(times[2:]):.2f} ms of {[round(one, 1) for one in times]}",
        flush=True,
    )
    sender.close()
    child.wait(20)


def main(shape: str = "qwen3-8b", sizes: str = "256", rounds: str = "rounds=12", transports: str = "nccl") -> None:
    """Measure all transports and sizes, and the ceiling."""
    torch.cuda.set_device(0)
    tensors = tensors_of(shape)
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    for transport in transports.split(","):
        for mib in map(int, sizes.split(",")):
            measure(tensors, transport, mib, int(rounds.removeprefix("rounds=")))
    rate = broadcast_rate(nbytes, [1])
    print(f"one broadcast of {nbytes / 2**20:.0f} MiB: {nbytes / rate / 1e6:.2f} ms, {rate:.0f} GB/s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2])
    else:
        main(*sys.argv[1:])
