# SPDX-License-Identifier: Apache-2.0
"""mcore's DistributedDataParallel, with hooks that add gradients together."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megarl.parallel.gradient_sums import add_gradients

# Elements of gradients that may wait for the end of a backward pass.
WAITING = 2**24


class WaitingGradients:
    """Gradients of a backward pass, to be added at its end, or as soon as they are many."""

    def __init__(self) -> None:
        self._parameters: list[torch.nn.Parameter] = []
        self._elements = 0

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Let ``parameter.grad`` wait. Call this in the backward pass."""
        if not self._parameters:
            # A layer that is recomputed has a backward pass of its own, at whose end this is called too.
            torch.autograd.Variable._execution_engine.queue_callback(self.add)
        self._parameters.append(parameter)
        self._elements += parameter.numel()
        if self._elements > WAITING:
            self.add()

    def add(self) -> None:
        """Add what waits."""
        with torch.no_grad():
            add_gradients(self._parameters, [parameter.grad for parameter in self._parameters])
        self.drop()

    def drop(self) -> None:
        """Forget what waits, as after a backward pass that has failed."""
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters, self._elements = [], 0


class SummingDDP(DistributedDataParallel):
    """mcore's, but for the order of the work: gradients are added at the end of a backward pass.

    Where mcore reduces each bucket as soon as its gradients are there (``overlap_grad_reduce``), all is mcore's.
    """

    @cached_property
    def waiting(self) -> WaitingGradients:
        """Gradients of the backward pass that runs."""
        return WaitingGradients()

    def zero_grad_buffer(self) -> None:
        """Zero the gradient buffers, and forget what a failed pass has left."""
        self.waiting.drop()
        super().zero_grad_buffer()

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        """Return what runs when autograd has put a gradient into ``param.grad``."""
        if self.ddp_config.overlap_grad_reduce:
            return super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if param.grad is not None:
                self.waiting.take(param)

        return hook
