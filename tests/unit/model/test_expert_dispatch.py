# SPDX-License-Identifier: Apache-2.0
"""Compare the dispatcher of a rank with all experts with mcore's functions that sort tokens and add up outputs."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from megarl.model.layers.experts.dispatch import LocalDispatcher

EXPERTS, WIDTH = 6, 8


def routing(tokens: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights ``[T, E]``, zero but for the chosen experts, and the choices. The last expert gets no token."""
    scores = torch.rand(tokens, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    scores[:, -1] = 0
    choices = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(chosen, dim=1).indices, True)
    return scores * choices, choices


@pytest.mark.parametrize(("tokens", "chosen"), [(7, 2), (1, 1), (32, 5), (0, 2)])
def test_it_sorts_and_adds_up_as_mcore_does(tokens, chosen):
    weights, choices = routing(tokens, chosen)
    hidden = torch.randn(tokens, 1, WIDTH, dtype=torch.float64)
    scales = torch.arange(1.0, 1 + EXPERTS, dtype=torch.float64)

    def ours(hidden: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        dispatcher = LocalDispatcher(SimpleNamespace(moe_router_topk=chosen))
        rows, kept = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, choices, weights))
        rows, counts, kept = dispatcher.dispatch_postprocess(rows, kept)
        out = rows * kept[:, None] * scales.repeat_interleave(counts)[:, None]
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(out)))
        return [rows, kept, counts, out]

    def mcores(hidden: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        flat = hidden.view(-1, WIDTH)
        rows, kept, order = permute(flat, choices, probs=weights, num_out_tokens=tokens * chosen)
        assert kept is not None
        counts = choices.sum(dim=0)
        out = rows * kept[:, None] * scales.repeat_interleave(counts)[:, None]
        return [rows, kept, counts, unpermute(out, order, flat.shape).view(hidden.shape)]

    results = []
    for function in (ours, mcores):
        leaves = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        found = function(*leaves)
        slope = torch.linspace(-1, 2, hidden.numel(), dtype=torch.float64).view(hidden.shape)
        results.append([*found, *torch.autograd.grad(found[-1], leaves, slope)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert results[0][2].sum() == tokens * chosen and results[0][2][-1] == 0
