# SPDX-License-Identifier: Apache-2.0
"""Launch the same kernels on the same memory once more, by one CUDA graph instead of one launch for each.

A sync of an adapter is a few kernels of some 0.1 ms. To launch them takes the host longer than that.
"""

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from megarl.checkpoint_engine.buckets.host_copies import to_host

logger = logging.getLogger(__name__)

# Graphs that are kept. Memory that is bound anew has other addresses, and the graphs of the old ones stay.
KEPT = 32


class _Launched(NamedTuple):
    """Kernels that were launched once: how, and pinned memory for their result."""

    launch: Callable[[], torch.Tensor]
    host: torch.Tensor


class _Captured(NamedTuple):
    """A graph of the kernels and of the copy of their result to the host.

    Attributes:
        graph: the graph.
        result: on the device; kept, so that no other graph of the pool uses its memory.
        host: the copy, pinned.
        done: follows the graph.
    """

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor
    host: torch.Tensor
    done: torch.cuda.Event

    def replay(self) -> Callable[[], torch.Tensor]:
        """Replay it on the current stream; return what waits for the result."""
        self.graph.replay()
        self.done.record()
        return self.value

    def value(self) -> torch.Tensor:
        """Wait for the result, and return it."""
        self.done.synchronize()
        return self.host


class Replays:
    """Kernels by what they work on: launched at first, captured by ``capture``, then replayed.

    Whoever holds one must see to it that the memory behind a key lives, and drop it with the memory.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Captured] = {}
        self._pending: dict[Hashable, _Launched] = {}
        # False once a capture failed.
        self._captures = torch.cuda.is_available()
        self._pool: tuple[int, int] | None = None

    def run(self, key: Hashable, launch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run kernels on the current stream. Any thread may.

        Args:
            key: all that the launch depends on, addresses included.
            launch: launches the kernels, and returns their result. It must not wait for the device.

        Returns:
            What waits for the result, and returns it on the host. With the same key it has the same memory: read it
            before the next run.
        """
        if (known := self._graphs.get(key)) is not None:
            return known.replay()
        result = launch()
        if self._captures:
            host = torch.empty_like(result, device="cpu", pin_memory=True)
            self._pending[key] = _Launched(launch, host)
        return to_host(result)

    def capture(self) -> None:
        """Capture what was launched and not replayed. Call it where no other thread launches kernels or draws numbers.

        A capture takes one of torch's streams, which another thread may be using, and the random generator's state.
        """
        if len(self._graphs) + len(self._pending) > KEPT:
            self._graphs, self._pool = {}, None
        while self._pending and self._captures:
            key, (launch, host) = self._pending.popitem()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                # The thread that launched them may have made tensors that only inference mode may write to.
                with torch.inference_mode(), torch.cuda.stream(stream):
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        result = launch()
                        host.copy_(result, non_blocking=True)
                    finally:
                        graph.capture_end()
                self._graphs[key] = _Captured(graph, result, host, torch.cuda.Event())
            except RuntimeError as error:
                self._captures = False
                logger.warning("syncs launch their kernels one by one: CUDA graphs cannot be captured (%s)", error)
        self._pending.clear()
