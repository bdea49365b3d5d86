# SPDX-License-Identifier: Apache-2.0
"""Messages between a sender and its receivers: what the sender learns of one that is gone."""

import socket
import struct
import time

import pytest

from megarl.checkpoint_engine.transports.channel import ACK, BUCKET, FAILED, RECEIPT, Hub, message_of, open_line
from megarl.errors import WeightSyncError


@pytest.mark.parametrize("reset", [False, True])
def test_a_receiver_whose_connection_ends_is_named(reset: bool) -> None:
    """Its process ended: the connection is closed, or reset where something was left unread."""
    hub = Hub(range(1), 5.0)
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
    hub = Hub(range(1), 5.0)
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


def test_messages_that_came_together_are_read_one_by_one() -> None:
    hub, soon = Hub(range(2), 5.0), time.monotonic() + 5
    lines = [open_line(hub.endpoint(), index) for index in range(2)]
    hub.connect(soon)
    large = bytes(300_000)
    for index, line in enumerate(lines):
        line.write(message_of(ACK, b"read") + message_of(RECEIPT, large + bytes([index])), soon)
    assert hub.collect(ACK, soon) == [b"read", b"read"]
    hub.check()
    lines[0].close()  # what it sent before still counts
    assert hub.collect(RECEIPT, soon) == [large + b"\0", large + b"\1"]
    with pytest.raises(WeightSyncError, match="receiver 0 is gone"):
        hub.check()
    # The reason for a failure is found behind a message that was read.
    lines[1].write(message_of(ACK, b"") + message_of(FAILED, b"no slot is idle"), soon)
    assert hub._lines[1].peek(1.0) == ACK and hub._message(1, ACK, soon) == b""
    with pytest.raises(WeightSyncError, match="receiver 1: no slot is idle"):
        hub._lines.pop(0)
        hub.check()
    hub.close()


def test_half_a_message_is_waited_for_until_the_deadline() -> None:
    hub = Hub(range(1), 5.0)
    line = open_line(hub.endpoint(), 0)
    hub.connect(time.monotonic() + 5)
    line.write(message_of(RECEIPT, b"all of it")[:11], time.monotonic() + 5)
    with pytest.raises(WeightSyncError, match="receiver 0 did not answer in time"):
        hub.collect(RECEIPT, time.monotonic() + 0.2)
    hub.close()


def test_whoever_does_not_know_the_token_is_no_receiver() -> None:
    hub = Hub(range(1), 5.0)
    endpoint = hub.endpoint()
    with socket.create_connection((endpoint["host"], endpoint["port"])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n    ")
    other = open_line(endpoint | {"token": "x" * len(endpoint["token"])}, 0)
    beyond, line = open_line(endpoint, 1), open_line(endpoint, 0)
    hub.connect(time.monotonic() + 5)
    hub.send(BUCKET, b"one", time.monotonic() + 5)
    assert line.receive(time.monotonic() + 5) == (BUCKET, b"one")
    assert not other.wait() and not beyond.wait()
    hub.close()
