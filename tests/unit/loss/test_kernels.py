# SPDX-License-Identifier: Apache-2.0
"""Compare the Triton kernels, run by Triton's interpreter on the CPU, with torch's own functions in float64."""

import pytest
import torch

from tests.helpers.interpreter import run_interpreted

pytest.importorskip("triton")

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 7, 8, 9001, 1.3


def test_kernels_equal_torch() -> None:
    run_interpreted("-m", "tests.unit.loss.test_kernels")


def compare(dtype: torch.dtype, bound: float) -> None:
    """Compare values and gradients of a chunked vocabulary shard by kernels with those of full logits."""
    from megarl.loss import chunks, logprobs

    chunks.has_kernels = lambda tensor: True
    generator = torch.Generator().manual_seed(0)
    hidden = (2 * torch.randn(TOKENS, HIDDEN, generator=generator)).to(dtype)
    weight = torch.randn(VOCAB + 5, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[0] = VOCAB - 1
    options = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "chunk_tokens": 3}
    for use, keep in (((1.0, 0.0), 0), ((0.0, 1.0), 0), ((1.0, -0.5), 0), ((1.0, -0.5), 2**30)):
        leaf = hidden.clone().requires_grad_()
        ours = logprobs.token_logprobs(leaf, weight, labels, **options, keep_bytes=keep)
        truth_leaf = hidden.double().requires_grad_()
        # A chunk's logits are rounded to the weight's dtype; their gradient ignores the rounding.
        exact = truth_leaf @ weight[:VOCAB].double().T
        rounded = exact + ((hidden @ weight[:VOCAB].T).double() - exact).detach()
        policy = torch.distributions.Categorical(logits=rounded / TEMPERATURE)
        truth = policy.log_prob(labels), policy.entropy()
        for mine, theirs in zip(ours, truth, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        gradients = []
        for results, start in ((ours, leaf), (truth, truth_leaf)):
            parts = [factor * result for factor, result in zip(use, results, strict=True) if factor]
            gradients.append(torch.autograd.grad(sum(part.sum() for part in parts), start)[0].double())
        error = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
        assert error <= bound, (dtype, use, float(error))


if __name__ == "__main__":
    compare(torch.float32, 5e-5)
    compare(torch.bfloat16, 2e-2)
