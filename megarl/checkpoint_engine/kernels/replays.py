# SPDX-License-Identifier: Apache-2.0
"""Launch the same kernels on the same memory once more, by one CUDA graph instead of one launch for each.

A sync of an adapter is a few kernels of some 0.1 ms. To launch them takes the host longer than that.
"""

from collections.abc import Callable, Hashable

import torch

# Graphs that are kept. Memory that is bound anew has other addresses, and the graphs of the old ones stay.
KEPT = 32


class Replays:
    """Kernels by what they work on: launched at first, captured by ``capture``, then replayed.

    Whoever holds one must see to it that the memory behind a key lives, and drop it with the memory.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pending: dict[Hashable, Callable[[], torch.Tensor]] = {}
        # False once a capture failed.
        self._captures = torch.cuda.is_available()
        self._pool: tuple[int, int] | None = None

    def run(self, key: Hashable, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run kernels on the current stream. Any thread may.

        Args:
            key: all that the launch depends on, addresses included.
            launch: launches the kernels, and returns their result. It must not wait for the device.

        Returns:
            The result. With the same key it has the same memory: read it before the next run.
        """
        known = self._graphs.get(key)
        if known is None:
            if self._captures:
                self._pending[key] = launch
            return launch()
        graph, result = known
        graph.replay()
        return result

    def capture(self) -> None:
        """Capture what was launched and not replayed. Call it where no other thread launches kernels or draws numbers.

        A capture takes one of torch's streams, which another thread may be using, and the random generator's state.
        """
        if len(self._graphs) + len(self._pending) > KEPT:
            self._graphs, self._pool = {}, None
        while self._pending and self._captures:
            key, launch = self._pending.popitem()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        result = launch()
                    finally:
                        graph.capture_end()
                self._graphs[key] = graph, result
            except RuntimeError:
                self._captures = False
        self._pending.clear()
