# SPDX-License-Identifier: Apache-2.0
"""Messages between a sender and its receivers: what the sender learns of one that is gone."""

import math
import socket
import struct
import time

import pytest

from megarl.checkpoint_engine.transports.channel import BUCKET, Hub, open_line
from megarl.checkpoint_engine.transports.collective import wait
from megarl.errors import WeightSyncError


@pytest.mark.parametrize("reset", [False, True])
def test_a_receiver_whose_connection_ends_is_named(reset: bool) -> None:
    """Its process ended: the connection is closed, or reset where something was left unread."""
    hub = Hub(1, 5.0)
    line = open_line(hub.endpoint(), 0)
    hub.connect(time.monotonic() + 5)
    if reset:
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.socket.close()
    time.sleep(0.1)
    with pytest.raises(WeightSyncError, match="receiver 0 is gone"):
        hub.check()
    hub.close()


def test_a_receiver_notices_that_the_sender_is_gone_without_taking_a_message() -> None:
    hub = Hub(1, 5.0)
    line = open_line(hub.endpoint(), 0)
    hub.connect(time.monotonic() + 5)
    line.check()
    hub.send(BUCKET, b"one", time.monotonic() + 5)
    line.wait()
    line.check()
    assert line.receive(time.monotonic() + 5) == (BUCKET, b"one")
    hub.close()
    assert not line.wait()
    with pytest.raises(WeightSyncError, match="the sender is gone"):
        line.check()
    line.close()


class Event:
    """Work of a device that ends at the ``looks``-th look."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def test_a_device_is_waited_for_as_long_as_the_others_live() -> None:
    looked: list[int] = []
    wait(Event(3), lambda: looked.append(1), time.monotonic() + 5, "nccl")
    assert len(looked) == 2

    def gone() -> None:
        raise WeightSyncError("receiver 1 is gone")

    with pytest.raises(WeightSyncError, match="receiver 1 is gone"):
        wait(Event(math.inf), gone, time.monotonic() + 5, "nccl")
    with pytest.raises(WeightSyncError, match="nccl transfer: broadcasts did not end in time"):
        wait(Event(math.inf), lambda: None, time.monotonic() + 0.1, "nccl")
