# SPDX-License-Identifier: Apache-2.0
"""Make random micro-batches of a loss, in float64, and cut them by sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from megarl.config import LossConfig
from megarl.loss import Loss, TokenBatch, sequence_weights
from megarl.loss.sequences import Sequences

LENGTHS = (5, 1, 0, 17, 3, 8, 2)
MAX_RESPONSE = 20
CONFIG = LossConfig(kl_coef=0.1, clip_low=0.1, clip_high=0.15, importance_cap=1.2)


@dataclass(frozen=True)
class Case:
    """A step: logprobs and loss inputs of all its tokens, sequence after sequence."""

    lengths: tuple[int, ...]
    logprobs_T: torch.Tensor
    tokens: TokenBatch

    def positions(self, sequences: Sequence[int]) -> torch.Tensor:
        """Return the token positions of some sequences, in the given order."""
        starts = np.cumsum((0, *self.lengths))
        parts = [torch.arange(starts[s], starts[s + 1]) for s in sequences]
        return torch.cat(parts) if parts else torch.arange(0)


def make_case(aggregation: str = "token_mean", lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Case:
    """Make logprobs that differ between policy, old, sampler and reference enough to hit every bound."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def near(base: torch.Tensor, spread: float) -> torch.Tensor:
        return base + spread * torch.randn(total, generator=generator, dtype=torch.float64)

    current = -3.0 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
    counts = torch.tensor(lengths)
    weights = sequence_weights(np.array(lengths), aggregation, MAX_RESPONSE)  # type: ignore[arg-type]
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    old = near(current, 0.2)
    tokens = TokenBatch(
        weights_T=torch.from_numpy(weights).repeat_interleave(counts),
        advantages_T=advantages.repeat_interleave(counts),
        token_fraction=1.0 / total,
        sampler_logprobs_T=near(old, 0.2),
        old_logprobs_T=old,
        reference_logprobs_T=near(current, 0.5),
        sequences=sequences_of(lengths),
    )
    return Case(lengths, current, tokens)


def sequences_of(lengths: Sequence[int]) -> Sequences:
    """Whole sequences on one rank, each a group of its own."""
    counts = np.array(lengths, dtype=np.int64)
    return Sequences(counts, counts, np.arange(len(counts)), torch.device("cpu"))


def select(case: Case, sequences: Sequence[int]) -> TokenBatch:
    """The micro-batch of some sequences."""
    positions, tokens = case.positions(sequences), case.tokens
    tensors = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    chosen: dict[str, Any] = {n: v[positions] for n, v in tensors.items() if isinstance(v, torch.Tensor)}
    return replace(tokens, **chosen, sequences=sequences_of([case.lengths[s] for s in sequences]))


def run(loss: Loss, case: Case, parts: Sequence[Sequence[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return loss, gradient of all logprobs and combined metrics of a step cut into micro-batches of sequences."""
    leaf = case.logprobs_T.clone().requires_grad_()
    total = 0.0
    metrics: dict[str, float] = {}
    for sequences in parts:
        output = loss(leaf[case.positions(sequences)], select(case, sequences))
        output.loss.backward()
        total += output.loss.item()
        for name, value in output.metrics.items():
            other = metrics.get(name, 0.0)
            metrics[name] = max(other, value.item()) if name.endswith("_max") else other + value.item()
    assert leaf.grad is not None
    return total, leaf.grad, metrics
