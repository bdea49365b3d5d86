# SPDX-License-Identifier: Apache-2.0
"""Pass calls of rank 0 to the other ranks of a torchrun job, and their answers back, through a store of their own."""

import os
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.network import LOOPBACK, own_address
from megarl.parallel.rendezvous import open_store


class Board:
    """Calls of rank 0 and answers of the others, in a store that all of them are connected to.

    Rank 0 never waits inside the store: its threads share one connection, which a waiting one would hold.

    Attributes:
        alone: True if there is no other rank, and so no store.
    """

    def __init__(self, timeout: float) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.alone = self._ranks == 1
        self._number = 0
        # Rank 0: the first call whose keys are in the store, and the ends of syncs that a rank may not have read yet.
        self._oldest, self._ended = 1, list[int]()
        if self.alone:
            return
        place: list[Any] = [None]
        if self._rank == 0:
            one_host = os.environ.get("LOCAL_WORLD_SIZE", str(self._ranks)) == str(self._ranks)
            host = LOOPBACK if one_host else own_address()
            self._store = open_store(host, timeout)
            place[0] = (host, self._store.port)
        dist.broadcast_object_list(place, 0)
        if self._rank != 0:
            host, port = place[0]
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))

    def call(self, method: str | None, arguments: tuple) -> int:
        """Rank 0: leave a call; its number."""
        self._number += 1
        if not self.alone:
            self._store.set(f"call/{self._number}", pickle.dumps((method, arguments)))
        return self._number

    def end(self, outcome: Any) -> None:
        """Rank 0: leave the outcome of a sync, and delete those before that every other rank has read to their end."""
        number = self.call(None, (outcome,))
        if self.alone:
            return
        while self._ended and self._store.check(self._answers(self._ended[0])):
            end = self._ended.pop(0)
            for old in range(self._oldest, end + 1):
                for key in [f"call/{old}", *self._answers(old)]:
                    self._store.delete_key(key)
            self._oldest = end + 1
        self._ended.append(number)

    def unanswered(self, number: int, answers: dict[int, Any]) -> list[int]:
        """Rank 0: read what has come; return the ranks that have not answered a call.

        Args:
            number: the call's.
            answers: gets each rank's answer.

        Raises:
            MegarlError: of a rank that failed.
        """
        for rank, key in enumerate(self._answers(number), 1):
            if rank in answers or not self._store.check([key]):
                continue
            answers[rank] = answer = pickle.loads(self._store.get(key))
            if isinstance(answer, BaseException):
                answer.args = (f"rank {rank}: {answer}",)
                raise answer
        return [rank for rank in range(1, self._ranks) if rank not in answers]

    def next_call(self, timeout: float) -> tuple[str | None, tuple]:
        """Another rank: wait for rank 0's next call, ``(method, arguments)``; None as method is the end of a sync."""
        self._number += 1
        key = f"call/{self._number}"
        try:
            self._store.wait([key], timedelta(seconds=timeout))
            return pickle.loads(self._store.get(key))
        except RuntimeError as error:
            raise WeightSyncError("rank 0 does not say how the sync goes on; it is gone or stuck") from error

    def went_on(self) -> bool:
        """Another rank: return True if rank 0 has left another call, without waiting for this one's answer."""
        return self._store.check([f"call/{self._number + 1}"])

    def answer(self, outcome: Any) -> None:
        """Another rank: say how the last call ended, by its result or a ``MegarlError``."""
        self._store.set(f"answer/{self._number}/{self._rank}", pickle.dumps(outcome))

    def _answers(self, number: int) -> list[str]:
        return [f"answer/{number}/{rank}" for rank in range(1, self._ranks)]
