# SPDX-License-Identifier: Apache-2.0
"""Compare chunked logprobs and entropy with torch's own on full logits, in float64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.errors import LossInputError
from megarl.loss import token_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 23, 12, 37, 40


def make_inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    policy = torch.distributions.Categorical(logits=hidden @ weight[:VOCAB].T / temperature)
    return policy.log_prob(labels), policy.entropy()


def gradients(results: tuple[torch.Tensor, ...], leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    mix = [torch.linspace(-1.0, 2.0, TOKENS, dtype=r.dtype) for r in results]
    for every, m in zip((3, 4), mix, strict=False):
        m[::every] = 0.0  # some tokens have a gradient through one result only, some through none
    return torch.autograd.grad(sum((m * r).sum() for m, r in zip(mix, results, strict=True)), leaves)


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("keep", [0, 2**20])
def test_values_and_gradients_equal_full_logits(temperature: float, chunk: int | None, keep: int) -> None:
    hidden, weight, labels = make_inputs()
    options = {"temperature": temperature, "vocab_size": VOCAB, "chunk_tokens": chunk, "keep_bytes": keep}
    ours = token_logprobs(hidden, weight, labels, **options)
    truth = reference(hidden, weight, labels, temperature)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(ours, (hidden, weight)), gradients(truth, (hidden, weight)), rtol=1e-11, atol=1e-12
    )


def test_logits_are_kept_for_one_backward_pass_only() -> None:
    hidden, weight, labels = make_inputs()
    products = []
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        for keep in (0, 2**20):
            before = counter.get_total_flops()
            logprobs, _ = token_logprobs(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=5, keep_bytes=keep)
            first = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]
            products.append(counter.get_total_flops() - before)
            assert torch.equal(first, torch.autograd.grad(logprobs.sum(), hidden)[0])
    forward = 2 * TOKENS * VOCAB * hidden.shape[1]
    assert products[0] - products[1] == forward


@pytest.mark.parametrize("chunk", [5, None])
def test_low_rank_deltas_enter_the_logits_exactly(chunk: int | None) -> None:
    hidden, weight, labels = make_inputs()
    generator = torch.Generator().manual_seed(1)
    deltas = [
        tuple(torch.randn(rows, rank, generator=generator, dtype=torch.float64).requires_grad_() for rows in shape)
        for rank, shape in ((3, (TOKENS, PADDED)), (1, (TOKENS, PADDED)))
    ]
    leaves = (hidden, weight, *(tensor for pair in deltas for tensor in pair))
    ours = token_logprobs(hidden, weight, labels, deltas=deltas, vocab_size=VOCAB, chunk_tokens=chunk)
    logits = hidden @ weight[:VOCAB].T + sum(inputs @ rows[:VOCAB].T for inputs, rows in deltas)
    policy = torch.distributions.Categorical(logits=logits)
    truth = (policy.log_prob(labels), policy.entropy())
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, leaves), gradients(truth, leaves), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_flows_through_each_result_alone(which: int) -> None:
    hidden, weight, labels = make_inputs()
    ours = token_logprobs(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=7)[which]
    truth = reference(hidden, weight, labels, 1.0)[which]
    torch.testing.assert_close(
        gradients((ours,), (hidden, weight)), gradients((truth,), (hidden, weight)), rtol=1e-11, atol=1e-12
    )


def test_padding_rows_have_no_probability_and_no_gradient() -> None:
    hidden, weight, labels = make_inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e3
    logprobs, entropy = token_logprobs(hidden, weight, labels, vocab_size=VOCAB)
    torch.testing.assert_close((logprobs, entropy), reference(hidden, weight, labels, 1.0))
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), weight)
    assert not gradient[VOCAB:].any()
    assert gradient[:VOCAB].any()


def test_huge_logits_stay_exact() -> None:
    hidden, weight, labels = make_inputs(torch.float32, scale=1e4)
    logprobs, entropy = token_logprobs(hidden, weight, labels, vocab_size=VOCAB)
    exact = reference(hidden.double(), weight.double(), labels, 1.0)
    assert logprobs.isfinite().all() and entropy.isfinite().all()
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=1e-5, atol=1e-2)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    assert gradient.isfinite().all()


def test_results_are_float32_and_bf16_is_no_worse_than_full_bf16_logits() -> None:
    hidden, weight, labels = make_inputs(torch.bfloat16)
    ours, entropy = token_logprobs(hidden, weight, labels, vocab_size=VOCAB)
    assert ours.dtype == entropy.dtype == torch.float32
    naive = (hidden @ weight[:VOCAB].T).float().log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    exact = reference(hidden.double(), weight.double(), labels, 1.0)[0]
    assert (ours - exact).norm() <= 1.05 * (naive - exact).norm()
    mine, theirs, truth = (torch.autograd.grad(r.sum(), hidden, retain_graph=True)[0] for r in (ours, naive, exact))
    truth = truth.double()
    assert (mine.double() - truth).norm() <= 1.05 * (theirs.double() - truth).norm()


def test_full_logits_never_exist() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return result

    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(300, 8)
    with Largest() as largest:
        delta = (torch.randn(512, 2, requires_grad=True), torch.randn(300, 2, requires_grad=True))
        logprobs, entropy = token_logprobs(
            hidden, weight, torch.randint(0, 300, (512,)), deltas=[delta], chunk_tokens=32
        )
        with torch.autograd.set_multithreading_enabled(False):
            (logprobs.sum() + entropy.sum()).backward()
    assert largest.numel == 32 * 300


def test_tokens_without_gradient_cost_nothing_and_change_nothing() -> None:
    hidden, weight, labels = make_inputs()
    keep = torch.arange(TOKENS) % 3 == 0
    results = token_logprobs(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=4)
    truth = reference(hidden, weight, labels, 1.0)
    ours = torch.autograd.grad((results[0] * keep).sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad((truth[0] * keep).sum(), (hidden, weight)))
    nothing = torch.autograd.grad((results[0] * 0.0).sum(), (hidden, weight))
    assert not any(gradient.any() for gradient in nothing)


def test_no_tokens_give_empty_results_and_zero_gradient() -> None:
    hidden, weight, labels = make_inputs()
    logprobs, entropy = token_logprobs(hidden[:0], weight, labels[:0], vocab_size=VOCAB)
    assert logprobs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    assert not gradient.any()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels = make_inputs()
    logprobs, _ = token_logprobs(hidden, weight.detach(), labels, vocab_size=VOCAB)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels_T": torch.zeros(TOKENS - 1, dtype=torch.int64)}, r"labels_T has shape \(22,\), expected \(23,\)"),
        ({"labels_T": torch.zeros(TOKENS, dtype=torch.int32)}, "labels_T is torch.int32"),
        ({"labels_T": torch.full((TOKENS,), VOCAB)}, "labels_T holds ids from 37 to 37; they must be 0 to 36"),
        ({"labels_T": torch.full((TOKENS,), -100)}, "labels_T holds ids from -100"),
        ({"hidden_TH": torch.zeros(TOKENS, HIDDEN + 1, dtype=torch.float64)}, "same last one"),
        ({"hidden_TH": torch.zeros(TOKENS, HIDDEN)}, "hidden_TH is torch.float32, weight_VH torch.float64"),
        ({"deltas": [(torch.zeros(TOKENS, 2), torch.zeros(PADDED, 2))]}, r"deltas has torch.float32 \(23, 2\)"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
)
def test_wrong_inputs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels = make_inputs()
    inputs = {"hidden_TH": hidden, "weight_VH": weight, "labels_T": labels, "vocab_size": VOCAB, **change}
    with pytest.raises(LossInputError, match=message):
        token_logprobs(**inputs)
