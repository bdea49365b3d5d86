# SPDX-License-Identifier: Apache-2.0
"""Vocab-parallel logprobs over real gloo ranks equal one process."""

import pytest
import torch
import torch.distributed as dist

from megarl.errors import LossInputError
from megarl.loss import token_logprobs
from tests.helpers.ranks import run_ranks

TOKENS, HIDDEN = 19, 8
# dtype -> largest error. float64 logits of -900 are rounded to 1e-13; float32 sums have 40 terms rounded to 6e-8.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-6}


def make_inputs(vocab: int, padded: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.float64:
        # All logits near -900, where exp is 0: a shard without real rows must not contribute a larger maximum.
        hidden[:, 0], weight[:, 0] = 25.0, -25.0
    # Rows of padding that must not matter, on whichever rank they are.
    weight[vocab:] = 50.0
    labels = torch.randint(0, vocab, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    return hidden, weight, labels


def one_rank(vocab: int, padded: int, temperature: float) -> dict[torch.dtype, list[torch.Tensor]]:
    """Return one rank's logprobs, entropy, hidden gradient summed over ranks, gradient of its rows, by dtype."""
    dist.init_process_group("gloo")
    try:
        rank, rows = dist.get_rank(), padded // dist.get_world_size()
        results = {}
        for dtype in BOUNDS:
            hidden, weight, labels = make_inputs(vocab, padded, dtype)
            shard = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
            hidden.requires_grad_()
            logprobs, entropy = token_logprobs(
                hidden,
                shard,
                labels,
                temperature=temperature,
                group=dist.group.WORLD,
                vocab_start=rank * rows,
                vocab_size=vocab,
                chunk_tokens=5,
            )
            objective(logprobs, entropy).backward()
            assert hidden.grad is not None and shard.grad is not None
            dist.all_reduce(hidden.grad)
            results[dtype] = [logprobs.detach(), entropy.detach(), hidden.grad, shard.grad]
        return results
    finally:
        dist.destroy_process_group()


def objective(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(-1.0, 1.0, TOKENS, dtype=logprobs.dtype) * logprobs + 0.3 * entropy).sum()


# 3 ranks of 43 ids in 66 rows: the second rank's shard is partly padding, the third's nothing else.
@pytest.mark.parametrize(("world", "vocab", "padded"), [(2, 37, 44), (3, 43, 66)])
def test_ranks_equal_one_process(world: int, vocab: int, padded: int) -> None:
    ranks = run_ranks(one_rank, world, vocab, padded, 0.7)
    for dtype, bound in BOUNDS.items():
        hidden, weight, labels = make_inputs(vocab, padded, dtype)
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        policy = torch.distributions.Categorical(logits=hidden @ weight[:vocab].T / 0.7)
        logprobs, entropy = policy.log_prob(labels), policy.entropy()
        objective(logprobs, entropy).backward()
        results = [rank[dtype] for rank in ranks]
        rows = torch.cat([result[3] for result in results])
        assert not rows[vocab:].any()
        exact = [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]
        for got, truth in zip([*results[0][:3], rows], exact, strict=True):
            assert truth is not None
            assert (got.double() - truth).abs().max() <= bound * max(1.0, float(truth.abs().max()))
        for result in results:
            # Ranks that differed in the last bit would drift apart.
            assert all(torch.equal(got, first) for got, first in zip(result[:3], results[0][:3], strict=True))


def test_a_group_needs_the_vocabulary_size() -> None:
    hidden, weight, labels = make_inputs(37, 44, torch.float32)
    with pytest.raises(LossInputError, match="vocab_size is None with a group"):
        token_logprobs(hidden, weight, labels, group=object())
