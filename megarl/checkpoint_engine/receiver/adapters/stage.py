# SPDX-License-Identifier: Apache-2.0
"""Fill one idle LoRA slot from one transfer, beside the engine's steps."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.receiver.adapters.slots import Slots
from megarl.checkpoint_engine.records import Receipt


class Stage:
    """Takes the next adapter into a slot. Make it between two steps of the engine; any one thread may then run it.

    Args:
        slots: the worker's slots.
        kept: LoRA ids that are current or that requests use; the slots of all others become free.
        device: the worker's. On a GPU the work is done on a stream of its own.
    """

    def __init__(self, slots: Slots, kept: list[int], device: torch.device) -> None:
        slots.keep(kept)
        slots.capture()  # here, because the thread that receives launches kernels beside the engine's steps
        self._slots, self._slot, self._device = slots, slots.idle(), device
        self._stream: Any = None
        if device.type == "cuda":
            # A step that was launched before may still read the slot.
            self._before = torch.cuda.Event()
            self._before.record()
            self._stream = _own_stream(device)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Make this thread ready to take the adapter. Before the adapter comes: a sync would wait for it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                # A thread gets ready for CUDA at its first use.
                torch.zeros(1, device=self._device).cpu()
                stack.enter_context(torch.cuda.stream(self._stream))
                self._stream.wait_event(self._before)
            yield

    def __call__(self, inbox: Inbox) -> Receipt:
        """Receive the adapter, within ``ready``; see ``Slots.stage``."""
        receipt = self._slots.stage(inbox, self._slot)
        if self._stream is not None:
            self._stream.synchronize()
        return receipt


@cache
def _own_stream(device: torch.device) -> Any:
    """Return the stream of all transfers into a device.

    torch hands out 32 streams of each priority again and again. With tensor parallelism vLLM computes on one of the
    default priority. A transfer on that one would wait for a step of this rank, and its broadcast for that of another,
    which may wait for the broadcast.
    """
    return torch.cuda.Stream(device, priority=-1)
