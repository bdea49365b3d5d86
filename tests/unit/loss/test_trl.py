# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient of every model weight equal TRL's own ``GRPOTrainer._compute_loss``.

The method is TRL's, called on a trainer that was not set up (no data, no optimizer) but has the attributes that it
reads. TRL gets padded rows and full attention; megarl gets the sequences one by one, in two micro-batches.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen3Config
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from megarl.config import LossConfig
from megarl.loss import TokenBatch, build_loss, sequence_weights, token_logprobs
from tests.unit.loss.cases import sequences_of

PROMPT, LONGEST, VOCAB, TEMPERATURE = 3, 9, 61, 0.8
LENGTHS = (9, 1, 4, 6)
# (TRL's loss_type, megarl's loss, megarl's aggregation)
PAIRS = [
    ("grpo", "grpo", "sequence_mean"),
    ("bnpo", "grpo", "token_mean"),
    ("dapo", "grpo", "token_mean"),
    ("dr_grpo", "grpo", "constant"),
    ("cispo", "cispo", "token_mean"),
    ("grpo", "gspo", "sequence_mean"),
]
# Both run the model in float32, padded against unpadded: measured 1.4e-5 of the largest entry.
BOUND = 5e-5


@dataclass(frozen=True)
class Rows:
    """A batch as TRL has it: ``[B, LONGEST]`` per-token values, padded on the right."""

    prompts: torch.Tensor
    completions: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    sampler: torch.Tensor


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model.train()


def current_logprobs(model: torch.nn.Module, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Return megarl's logprobs ``[R]`` of one unpadded sequence."""
    hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
    return token_logprobs(hidden, model.lm_head.weight, response, temperature=TEMPERATURE, chunk_tokens=3)[0]


@pytest.fixture(scope="module")
def rows(model: torch.nn.Module) -> Rows:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCAB, (len(LENGTHS), PROMPT), generator=generator)
    completions = torch.randint(0, VOCAB, (len(LENGTHS), LONGEST), generator=generator)
    mask = (torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]).long()
    current = torch.zeros(mask.shape)
    with torch.no_grad():
        for s, length in enumerate(LENGTHS):
            current[s, :length] = current_logprobs(model, prompts[s], completions[s, :length])

    def near(base: torch.Tensor, spread: float) -> torch.Tensor:
        return (base + spread * torch.randn(mask.shape, generator=generator)) * mask

    old = near(current, 0.3)
    advantages = torch.tensor([1.3, -0.7, -1.1, 0.5])
    return Rows(prompts, completions, mask, advantages, old, near(current, 0.6), near(old, 0.3))


def trl_loss(model: torch.nn.Module, rows: Rows, loss_type: str, config: LossConfig, on_policy: bool) -> torch.Tensor:
    trainer = object.__new__(GRPOTrainer)
    trainer.model, trainer.accelerator = model, Accelerator(cpu=True)
    trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer.loss_type, trainer.beta = loss_type, config.kl_coef
    trainer.importance_sampling_level = "sequence" if config.name == "gspo" else "token"
    trainer.epsilon_low, trainer.epsilon_high = config.clip_low, config.clip_high
    if loss_type == "cispo":
        trainer.epsilon_high = 1.0 + config.clip_high
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = LONGEST, 1
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = config.importance_cap is not None
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    inputs = {
        "prompt_ids": rows.prompts,
        "prompt_mask": torch.ones_like(rows.prompts),
        "completion_ids": rows.completions,
        "completion_mask": rows.mask,
        "advantages": rows.advantages,
        "num_items_in_batch": rows.mask.sum(),
        "ref_per_token_logps": rows.reference,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = rows.old
    if config.importance_cap is not None:
        # As _generate_and_score_completions computes it (mode "token_truncate").
        inputs["importance_sampling_ratio"] = (
            ((rows.old - rows.sampler) * rows.mask).exp().clamp(max=config.importance_cap)
        )
    return trainer._compute_loss(model, inputs)


def our_loss(model: torch.nn.Module, rows: Rows, config: LossConfig, on_policy: bool) -> torch.Tensor:
    weights = sequence_weights(np.array(LENGTHS), config.aggregation, LONGEST)
    loss = build_loss(config)
    total = torch.zeros(())
    for part in ((2, 0), (3, 1)):

        def pick(values: torch.Tensor, part: tuple[int, ...] = part) -> torch.Tensor:
            return torch.cat([values[s, : LENGTHS[s]] for s in part])

        per_token = torch.ones(rows.mask.shape)
        tokens = TokenBatch(
            weights_T=pick(per_token * torch.from_numpy(weights)[:, None]).float(),
            advantages_T=pick(per_token * rows.advantages[:, None]),
            token_fraction=1.0 / sum(LENGTHS),
            sampler_logprobs_T=pick(rows.sampler),
            old_logprobs_T=None if on_policy else pick(rows.old),
            reference_logprobs_T=pick(rows.reference),
            sequences=sequences_of([LENGTHS[s] for s in part]),
        )
        logprobs = [current_logprobs(model, rows.prompts[s], rows.completions[s, : LENGTHS[s]]) for s in part]
        total = total + loss(torch.cat(logprobs), tokens).loss
    return total


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def compare(
    model: torch.nn.Module, rows: Rows, loss_type: str, config: LossConfig, *, on_policy: bool
) -> tuple[float, float]:
    theirs, ours = trl_loss(model, rows, loss_type, config, on_policy), our_loss(model, rows, config, on_policy)
    their_gradient, our_gradient = gradient(model, theirs), gradient(model, ours)
    assert their_gradient.abs().max() > 1e-3
    error = (our_gradient - their_gradient).abs().max() / their_gradient.abs().max()
    return abs(ours.item() - theirs.item()), float(error)


@pytest.mark.parametrize("importance_cap", [None, 1.1])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("loss_type", "name", "aggregation"), PAIRS)
def test_loss_and_gradient_equal_trl_off_policy(
    model: torch.nn.Module,
    rows: Rows,
    loss_type: str,
    name: str,
    aggregation: str,
    kl_coef: float,
    importance_cap: float | None,
) -> None:
    # TRL's CISPO has no lower bound, so megarl's is put out of reach.
    config = LossConfig(
        name=name,
        aggregation=aggregation,  # type: ignore[arg-type]
        kl_coef=kl_coef,
        importance_cap=importance_cap,
        clip_low=0.99 if name == "cispo" else 0.1,
        clip_high=0.15,
    )
    loss_error, gradient_error = compare(model, rows, loss_type, config, on_policy=False)
    assert loss_error <= BOUND
    assert gradient_error <= BOUND


@pytest.mark.parametrize(("loss_type", "name", "aggregation"), PAIRS)
def test_loss_and_gradient_equal_trl_on_policy(
    model: torch.nn.Module, rows: Rows, loss_type: str, name: str, aggregation: str
) -> None:
    config = LossConfig(name=name, aggregation=aggregation, importance_cap=None, kl_coef=0.3)  # type: ignore[arg-type]
    loss_error, gradient_error = compare(model, rows, loss_type, config, on_policy=True)
    assert loss_error <= BOUND
    assert gradient_error <= BOUND


def test_the_comparison_would_catch_another_clip_range_or_advantage(model: torch.nn.Module, rows: Rows) -> None:
    config = LossConfig(aggregation="token_mean", importance_cap=None, clip_low=0.1, clip_high=0.15)
    theirs = gradient(model, trl_loss(model, rows, "dapo", config, False))
    ours = gradient(model, our_loss(model, rows, config.model_copy(update={"clip_high": 0.3}), False))
    assert (ours - theirs).abs().max() / theirs.abs().max() > 10 * BOUND
    other = gradient(model, our_loss(model, replace(rows, advantages=rows.advantages * 1.01), config, False))
    assert (other - theirs).abs().max() / theirs.abs().max() > 10 * BOUND
