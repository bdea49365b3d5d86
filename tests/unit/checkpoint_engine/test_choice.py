# SPDX-License-Identifier: Apache-2.0
"""``transport: auto`` follows from where trainer and engines compute."""

import pytest

from megarl.checkpoint_engine.base import Link, open_receiver, open_sender
from megarl.checkpoint_engine.choice import Memory, Receiver, choose_transport, own_memory, own_receiver, own_sender
from megarl.errors import WeightSyncError

GPU0, GPU1, GPU2 = (Memory("here", f"GPU-{number}") for number in range(3))
OTHER = Memory("there", "GPU-3")
CPU, OTHER_CPU = Memory("here", ""), Memory("there", "")


@pytest.mark.parametrize(
    ("ranks", "receivers", "transport"),
    [
        ([GPU0, GPU1, OTHER], [GPU1, OTHER], "ipc"),
        ([GPU0, GPU1], [GPU0, GPU1], "ipc"),
        ([GPU0, GPU1], [GPU1], "ipc"),
        ([GPU0, GPU1], [GPU2], "nccl"),
        ([GPU0, GPU1], [GPU1, OTHER], "nccl"),
        ([CPU, OTHER_CPU], [OTHER_CPU, CPU], "ipc"),
        ([CPU, CPU], [CPU, OTHER_CPU], "gloo"),
        ([GPU0], [GPU0], "ipc"),
        ([GPU0], [GPU0, GPU0], "ipc"),
        ([GPU0], [GPU0, GPU1], "ipc"),
        ([GPU0], [GPU1, GPU1], "ipc"),
        ([GPU0], [GPU1], "nccl"),
        ([GPU0], [Receiver(GPU1, reads=True)], "ipc"),
        ([GPU0], [Receiver(GPU1, reads=True), Receiver(GPU2, reads=True)], "nccl"),
        ([CPU], [CPU, CPU], "ipc"),
        ([GPU0], [CPU], "shm"),
        ([CPU], [GPU0], "shm"),
        ([GPU0], [GPU1, OTHER], "nccl"),
        ([GPU0], [GPU0, OTHER], "gloo"),
        ([CPU], [OTHER_CPU], "gloo"),
    ],
)
def test_auto_follows_from_the_memories(
    ranks: list[Memory], receivers: list[Memory | Receiver], transport: str
) -> None:
    places = [Receiver(one) if isinstance(one, Memory) else one for one in receivers]
    assert choose_transport(ranks, places)[0] == transport


def test_processes_of_one_host_have_one_memory() -> None:
    assert own_memory() == own_memory()
    assert own_memory().host


def test_nothing_is_read_over_a_link_on_cpus() -> None:
    sender = own_sender()
    assert sender.memory == own_memory()
    assert own_receiver(sender) == Receiver(own_memory(), reads=False)


def test_memory_of_another_device_is_refused() -> None:
    sender = open_sender("ipc", Link(1, 1.0))
    endpoint = sender.endpoint()
    host = endpoint["memory"][0]
    for memory, told in (([host, "7"], f"GPU 7 of host {host}"), (["away", ""], "the CPUs of host away")):
        match = rf"receiver 0 computes on the CPUs of .* and trainer rank 0 on {told}; use transport 'nccl'"
        with pytest.raises(WeightSyncError, match=match):
            open_receiver(endpoint | {"memory": memory}, 0)
    sender.close()
