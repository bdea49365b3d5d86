# SPDX-License-Identifier: Apache-2.0
"""Run a model's forward and backward pass on aliases of its trained parameters, as a capture needs it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.func import functional_call

from megarl.parallel.gradient_sums import add_gradients
from megarl.parallel.stacks import alias


class AliasedModel(torch.nn.Module):
    """Runs a model on leaves of autograd's of its own, and adds their gradients to mcore's buffers.

    Attributes:
        model: the model.
        trained: parameters that are trained.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        named = [(name, weight) for name, weight in self.named_parameters() if weight.requires_grad]
        self._names, self.trained = [name for name, _ in named], [weight for _, weight in named]

    def passes(
        self,
        feed: Mapping[str, Any],
        by_hidden: torch.Tensor | None = None,
        forward: Callable[[], AbstractContextManager] = nullcontext,
        backward: Callable[[], AbstractContextManager] = nullcontext,
    ) -> torch.Tensor:
        """Run a forward pass and, if autograd is on, the backward pass. Returns the model's output, detached.

        The model has its aliases in both: a layer that is recomputed reads them again.

        Args:
            feed: the model's arguments.
            by_hidden: gradient of the output. None for zeros, which are not added to anything.
            forward, backward: functions that make what these passes run in.
        """
        leaves = [alias(parameter) for parameter in self.trained]
        swapped = dict(zip(self._names, leaves, strict=True))
        return functional_call(self, swapped, (feed, by_hidden, leaves, forward, backward))

    def forward(
        self,
        feed: Mapping[str, Any],
        by_hidden: torch.Tensor | None,
        leaves: list[torch.Tensor],
        forward: Callable[[], AbstractContextManager],
        backward: Callable[[], AbstractContextManager],
    ) -> torch.Tensor:
        """Run what ``passes`` runs, ``leaves`` being in the trained parameters' places."""
        with forward():
            hidden = self.model(**feed)
        if torch.is_grad_enabled():
            with backward():
                # Not autograd.grad: mcore refuses it where layers are recomputed.
                torch.autograd.backward(hidden, torch.zeros_like(hidden) if by_hidden is None else by_hidden)
                if by_hidden is not None:
                    add_gradients(self.trained, [leaf.grad for leaf in leaves])
        return hidden.detach()
