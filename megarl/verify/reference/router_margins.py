# SPDX-License-Identifier: Apache-2.0
"""Tokens that no two computations need send to the same experts.

Two experts whose router logits agree to within rounding are a toss-up: the token goes to the one or the other, nothing
is wrong, and everything after it differs. Which samples of a batch hold such tokens, in any pass of its updates, only
the reference can tell; they are left out of what is verified in float32, whose bounds assume that rounding stays small.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.types import Sample

# Of a token's largest logit: ten times what float32 makes of the logits of a model of some layers.
NEAREST = 1e-5


class Gaps:
    """The least distance between a chosen and a rejected expert by sequence, over all passes while it listens.

    Attributes:
        least: token ids -> smallest gap of any token in any router, relative to the token's largest logit.
    """

    def __init__(self) -> None:
        self.least: dict[tuple[int, ...], float] = {}
        self._now: tuple[int, ...] = ()

    @contextmanager
    def listen(self, model: torch.nn.Module) -> Iterator["Gaps"]:
        """Watch the passes of a Hugging Face model, one sequence each."""
        hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        hooks += [module.register_forward_hook(self._route) for module in model.modules() if _routes(module)]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def clear(self, samples: Sequence[Sample]) -> list[int]:
        """Indices of the samples in which no two experts tie."""
        gaps = [self.least.get(tuple(sample.tokens.tolist()), float("inf")) for sample in samples]
        return [index for index, gap in enumerate(gaps) if gap > NEAREST]

    def _begin(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._now = tuple(kwargs["input_ids"][0].tolist())

    def _route(self, router: torch.nn.Module, args: Any, output: Any) -> None:
        logits, _, chosen = output
        logits = logits.detach()
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True)
        last, next_best = logits.masked_fill(~is_chosen, torch.inf), logits.masked_fill(is_chosen, -torch.inf)
        gaps = (last.amin(-1) - next_best.amax(-1)) / logits.abs().amax(-1)
        self.least[self._now] = min(self.least.get(self._now, float("inf")), float(gaps.min()))


def _routes(module: torch.nn.Module) -> bool:
    """Whether a module chooses the experts of the largest logits. Those of a group, or of logits with a bias, are
    chosen otherwise; such families are verified without this."""
    return type(module).__name__.endswith("TopKRouter")
