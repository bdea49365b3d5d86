# SPDX-License-Identifier: Apache-2.0
"""Launch the same kernels on the same memory once more, by one CUDA graph instead of one launch for each.

A sync of an adapter is a few kernels of some 0.1 ms. To launch them takes the host longer than that.
"""

from collections.abc import Callable, Hashable

import torch


class Replays:
    """Kernels by what they work on; launched at first, captured when they come again, then replayed.

    Whoever holds one must see to it that the memory behind a key lives, and drop it with the memory.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor] | None] = {}
        self._captures = True

    def run(self, key: Hashable, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run kernels on the current stream.

        Args:
            key: all that the launch depends on, addresses included.
            launch: launches the kernels, and returns their result. It must not wait for the device.

        Returns:
            The result. With the same key it has the same memory: read it before the next run.
        """
        if key not in self._graphs or not self._captures:
            self._graphs[key] = None
            return launch()
        known = self._graphs[key] = self._graphs[key] or self._captured(launch)
        if known is None:
            return launch()
        graph, result = known
        graph.replay()
        return result

    def _captured(self, launch: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """Return the kernels as a graph, and their result; None if they cannot be captured, and no others then."""
        if not torch.cuda.is_available():  # Triton's interpreter
            return None
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads of the process go on with their work.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    result = launch()
                finally:
                    graph.capture_end()
        except RuntimeError:
            self._captures = False
            return None
        return graph, result
