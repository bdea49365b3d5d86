# SPDX-License-Identifier: Apache-2.0
"""Accept connections of those who were told a token; each says its number in its first message."""

import hmac
import secrets
import socket
import time
from collections.abc import Container
from multiprocessing.connection import Connection

from megarl.network import connect

# Bytes of the first message: the token, then the number.
TOKEN_BYTES, NUMBER_BYTES = 32, 4
# Seconds in which whoever connects must send it.
HELLO_SECONDS = 5.0
# A silent node is asked after so many seconds, so often, and is gone if it does not answer.
KEPT_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_hex(TOKEN_BYTES // 2)


def reach(host: str, port: int, token: str, number: int, timeout: float) -> socket.socket:
    """Connect to a listener, and say who this is. Raises ``OSError``."""
    peer = _undelayed(connect(host, port, timeout))
    peer.sendall(token.encode() + number.to_bytes(NUMBER_BYTES, "little"))
    return peer


def accept(listener: socket.socket, token: str, numbers: Container[int], deadline: float) -> tuple[int, socket.socket]:
    """Wait for the next one that knows the token and has one of some numbers; return its number and the connection.

    Others are disconnected. One that says nothing is waited for at most ``HELLO_SECONDS``.

    Raises:
        OSError: none came before ``deadline``, a time of ``time.monotonic``.
    """
    while True:
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
        peer = _undelayed(listener.accept()[0])
        if (number := _number_of(peer, token)) in numbers:
            return number, peer
        peer.close()


def as_pipe(peer: socket.socket) -> Connection:
    """Make a connected socket a pipe for pickled values.

    A process that ends is noticed at once on the other side, a node that is cut off after half a minute.
    """
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEPT_ALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(peer.detach())


def _number_of(peer: socket.socket, token: str) -> int:
    """Return the number of who has connected, or -1 if its first message does not have the token."""
    deadline, hello = time.monotonic() + HELLO_SECONDS, b""
    try:
        while len(hello) < TOKEN_BYTES + NUMBER_BYTES:
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (came := peer.recv(TOKEN_BYTES + NUMBER_BYTES - len(hello))):
                return -1
            hello += came
    except OSError:
        return -1
    known = hmac.compare_digest(hello[:TOKEN_BYTES], token.encode())
    return int.from_bytes(hello[TOKEN_BYTES:], "little") if known else -1


def _undelayed(peer: socket.socket) -> socket.socket:
    """Let short messages that follow each other leave at once."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
