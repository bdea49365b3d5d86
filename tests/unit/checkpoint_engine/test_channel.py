# SPDX-License-Identifier: Apache-2.0
"""Messages between a sender and its receivers: what the sender learns of one that is gone."""

import socket
import struct
import time

import pytest

from megarl.checkpoint_engine.transports.channel import Hub, open_line
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
