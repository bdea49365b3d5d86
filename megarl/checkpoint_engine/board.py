# SPDX-License-Identifier: Apache-2.0
"""Pass calls of rank 0 to the other ranks of a torchrun job, and their answers back, over a connection to each."""

import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from megarl.checkpoint_engine.transports.hello import accept, as_pipe, new_token, reach
from megarl.errors import WeightSyncError
from megarl.futures.lines import DirectCall, DirectLine
from megarl.network import LOOPBACK, listen, own_address


class Board:
    """Calls of rank 0 and answers of the others. A collective over the ranks of the default process group.

    Every rank takes rank 0's calls in their order. A process that ends is noticed at once on the other side, a node
    that is cut off after half a minute.

    Args:
        timeout: seconds within which all ranks connect.

    Attributes:
        alone: True if there is no other rank.

    Raises:
        WeightSyncError: a rank did not connect.
    """

    def __init__(self, timeout: float) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.alone = ranks == 1
        # Of rank 0: to rank 1, 2 and so on.
        self._lines = list[DirectLine]()
        if self.alone:
            return
        if rank == 0:
            one_host = os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) == str(ranks)
            host, token = LOOPBACK if one_host else own_address(), new_token()
            with listen(host) as listener:
                dist.broadcast_object_list([(host, listener.getsockname()[1], token)], 0)
                pipes = _accepted(listener, token, ranks - 1, timeout)
            self._lines = [DirectLine(pipe, _gone) for pipe in pipes]
            return
        place: list[Any] = [None]
        dist.broadcast_object_list(place, 0)
        host, port, token = place[0]
        try:
            self._pipe = as_pipe(reach(host, port, token, rank, timeout))
        except OSError as error:
            raise WeightSyncError(f"cannot reach rank 0 at {host}:{port}: {error}") from error
        self._number = 0

    def call(self, method: str, *arguments: Any) -> list[DirectCall]:
        """Rank 0: let every other rank do something; their answers, by rank from 1 on."""
        return [line.call(method, *arguments) for line in self._lines]

    def tell(self, method: str | None, *arguments: Any) -> None:
        """Rank 0: leave word for every other rank, which nobody answers."""
        for line in self._lines:
            line.tell(method, *arguments)

    def next_call(self, timeout: float) -> tuple[str | None, tuple]:
        """Another rank: wait for rank 0's next call or word; return its method and arguments.

        Raises:
            WeightSyncError: none came within ``timeout`` seconds, or rank 0 is gone.
        """
        cause: Exception | None = None
        try:
            if self._pipe.poll(timeout):
                self._number, method, arguments = self._pipe.recv()
                return method, arguments
        except (EOFError, OSError) as error:
            cause = error
        raise WeightSyncError("rank 0 does not say how the sync goes on; it is gone or stuck") from cause

    def went_on(self) -> bool:
        """Another rank: return True if rank 0 has not waited for this one's answer, or is gone."""
        return self._pipe.poll(0.0)

    def answer(self, outcome: Any) -> None:
        """Another rank: say how the last call ended, by its result or a ``MegarlError``."""
        try:
            self._pipe.send((self._number, not isinstance(outcome, BaseException), outcome))
        except OSError as error:
            raise WeightSyncError("rank 0 is gone") from error


def _accepted(listener: socket.socket, token: str, count: int, timeout: float) -> list[Connection]:
    """Return the connections of the ranks from 1 on."""
    deadline, ranks, found = time.monotonic() + timeout, range(1, count + 1), dict[int, Connection]()
    while len(found) < count:
        try:
            rank, peer = accept(listener, token, ranks, deadline)
        except OSError as error:
            missing = ", ".join(str(rank) for rank in ranks if rank not in found)
            raise WeightSyncError(f"rank {missing} did not connect to rank 0 within {timeout:g} s: {error}") from error
        found[rank] = as_pipe(peer)
    return [found[rank] for rank in ranks]


def _gone() -> WeightSyncError:
    return WeightSyncError("its process is gone")
