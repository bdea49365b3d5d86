# SPDX-License-Identifier: Apache-2.0
"""Find samples whose router logits are nearly tied, so that rounding may change the chosen expert.

If the router logits of two experts agree within rounding, the token may go to either. Neither is wrong, but everything
after it differs. Only the reference can tell which samples of a batch hold such tokens, in any pass of its updates.
They are left out in float32, whose bounds assume that rounding errors stay small.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.types import Sample

# Relative to a token's largest logit: ten times the float32 error of router logits in a model of some layers.
NEAREST = 1e-5


class RouterMargins:
    """The smallest margin between a chosen and a rejected expert, per sequence, over all passes while it listens.

    Attributes:
        least: maps token ids to the smallest margin of any token in any router, relative to the token's largest logit.
    """

    def __init__(self) -> None:
        self.smallest: dict[tuple[int, ...], float] = {}
        self._now: tuple[int, ...] = ()

    @contextmanager
    def listen(self, model: torch.nn.Module) -> Iterator["RouterMargins"]:
        """Record the passes of a Hugging Face model, one sequence each."""
        hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        hooks += [module.register_forward_hook(self._route) for module in model.modules() if _routes(module)]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def without_ties(self, samples: Sequence[Sample]) -> list[int]:
        """Return the indices of the samples in which no two experts tie."""
        margins = [self.smallest.get(tuple(sample.tokens.tolist()), float("inf")) for sample in samples]
        return [index for index, margin in enumerate(margins) if margin > NEAREST]

    def _begin(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._now = tuple(kwargs["input_ids"][0].tolist())

    def _route(self, router: torch.nn.Module, args: Any, output: Any) -> None:
        logits, _, chosen = output
        logits = logits.detach()
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True)
        last, next_best = logits.masked_fill(~is_chosen, torch.inf), logits.masked_fill(is_chosen, -torch.inf)
        margins = (last.amin(-1) - next_best.amax(-1)) / logits.abs().amax(-1)
        self.smallest[self._now] = min(self.smallest.get(self._now, float("inf")), float(margins.min()))


def _routes(module: torch.nn.Module) -> bool:
    """Return True if a module chooses the experts with the largest logits.

    Routers that choose within groups, or by logits with a bias, have other names; their families are verified without
    this.
    """
    return type(module).__name__.endswith("TopKRouter")
