# SPDX-License-Identifier: Apache-2.0
"""Check the chunked logprobs on CUDA, in bf16 and at a real vocabulary size."""

import pytest
import torch

from megarl.loss import token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

TOKENS, HIDDEN, VOCAB = 4096, 1024, 151_936


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda", generator=generator) * 0.05).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), device="cuda", generator=generator)


def test_bf16_is_no_further_from_float64_than_full_bf16_logits() -> None:
    hidden, weight, labels = make_inputs(torch.bfloat16)
    few = slice(0, 64)

    def full(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = hidden[few].to(dtype).requires_grad_()
        logits = (leaf @ weight.to(dtype).T).to(torch.float64 if dtype == torch.float64 else torch.float32)
        logprobs = logits.log_softmax(1).gather(1, labels[few, None]).squeeze(1)
        (gradient,) = torch.autograd.grad(logprobs.sum(), leaf)
        return logprobs.detach().double(), gradient.double()

    leaf = hidden.clone().requires_grad_()
    logprobs, _ = token_logprobs(leaf, weight, labels)
    logprobs.sum().backward()
    truth, naive = full(torch.float64), full(torch.bfloat16)
    ours = logprobs.detach()[few].double(), leaf.grad[few].double()
    for mine, other, exact in zip(ours, naive, truth, strict=True):
        assert (mine - exact).norm() <= 1.05 * (other - exact).norm()


def test_memory_stays_far_below_full_logits() -> None:
    hidden, weight, labels = make_inputs(torch.bfloat16)
    hidden.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = token_logprobs(hidden, weight, labels)
    (logprobs.sum() + entropy.sum()).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2 * 2**30 < TOKENS * VOCAB * 4  # full float32 logits alone: 2.3 GiB
