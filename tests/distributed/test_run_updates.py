# SPDX-License-Identifier: Apache-2.0
"""Update the model with one rollout.

Dropout does not affect the measured mismatch with the sampler. Without signal there is no backward pass. The KL penalty
refers to the adapter that the run started from.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import RunConfig, parse_config
from megarl.controller.actors.adapters import REFERENCE, build_trainer, check_start, load_start
from megarl.controller.actors.updates import RankTrainer, plan, tokens_of
from megarl.controller.updates import run_updates
from megarl.errors import CheckpointError, MegarlError
from megarl.loss import build_loss
from megarl.types import Sample
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import everything

OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
GROUP = 4


def build(folder: Path, *, adapter: str = "adapter", train: dict[str, Any] | None = None, **loss: Any) -> Any:
    """Return this rank's model as a run builds it, its config, and the origin that a checkpoint stores."""
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    config = parse_config(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "task": {"name": "arithmetic"},
            "parallel": {"data": 2},
            "lora": {"init_from": str(folder / adapter)},
            "loss": loss,
            "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24, "samples_per_prompt": GROUP},
            "train": {"micro_batch_tokens": 64, "prompts_per_step": 4, "weight_decay": 0.1} | (train or {}),
        }
    )
    groups = init_groups(config.parallel, pick_device("auto"), seed=5)
    model = build_trainer(config, groups)
    return model, config, load_start(model, config)


def rollout(model: Any, config: RunConfig, seed: int, signal: float = 1.0) -> list[Sample]:
    """Return samples whose sampler logprobs equal the trainer's."""
    samples = make_samples(2 * GROUP, SHAPE["vocab_size"], seed=seed)
    drawn = model.forward(plan(model, config, samples))
    return [
        dataclasses.replace(s, advantage=signal * s.advantage, sampler_logprobs=d, group=index // GROUP)
        for index, (s, d) in enumerate(zip(samples, drawn, strict=True))
    ]


def update(model: Any, config: RunConfig, samples: list[Sample], updates: int = 1) -> dict[str, float]:
    metrics = run_updates(RankTrainer(model, build_loss(config.loss), config), config, samples, [1e-3] * updates)
    times = [metrics.pop(f"{name}_seconds") for name in ("forward", "backward")]
    assert [time > 0 for time in times] == [metrics["skipped_backward"] < 1] * 2
    return metrics


def with_dropout(folder: str) -> list[dict[str, float]]:
    model, config, _ = build(Path(folder), adapter="dropped")
    samples, results = rollout(model, config, 0), []
    packed: list[Any] = []
    model.pack = lambda *arguments, real=model.pack: packed.append(arguments) or real(*arguments)
    results.append(update(model, config, samples))
    assert len(packed) == 1
    results.append(update(model, config, rollout(model, config, 1), updates=2))
    return results


def without_signal(folder: str) -> None:
    """Check that a step without a backward pass ends like one with a zero gradient, also with overlapped reduction."""
    from megarl.parallel.groups import leave_layout

    for train in ({}, OVERLAP):
        leave_layout()
        (whole, config, _), (short, _, _) = (build(Path(folder), train=train) for _ in range(2))
        loss, metrics = build_loss(config.loss), {}
        # Steps before any gradient, and between steps that have one.
        for step, signal in enumerate((0.0, 1.0, 1.0, 0.0, 0.0, 1.0)):
            samples = rollout(whole, config, step, signal)
            expected = {**whole.forward_backward(plan(whole, config, samples), loss), **whole.optim_step(1e-3)}
            backward = short.forward_backward
            if not signal:
                short.forward_backward = None  # a call would raise
            metrics = update(short, config, samples)
            short.forward_backward = backward
            assert metrics.pop("skipped_backward") == float(not signal)
            # The rounding of a mismatch of zero differs between passes with and without gradients.
            off = {n: (v, metrics.get(n)) for n, v in expected.items() if not abs(v - metrics[n]) < 1e-5 * (1 + abs(v))}
            assert not off and metrics.keys() == expected.keys(), (step, off)
            actual, wanted = everything(short), everything(whole)
            assert not [name for name in wanted if not torch.equal(actual[name], wanted[name])]
            assert short.version == whole.version == step + 1
        check_masked(whole, short, config)


def check_masked(whole: Any, short: Any, config: RunConfig) -> None:
    """Check that two tokens without a loss stand for any number, and that a step may hold no others.

    Args:
        whole, short: models with the same weights and moments.
        config: of both.
    """
    samples = rollout(whole, config, 9)
    hidden = [
        dataclasses.replace(
            sample,
            advantage=0.0,
            response_mask=np.zeros_like(sample.response_mask),
            sampler_logprobs=sample.sampler_logprobs[:0],
        )
        for sample in samples
    ]
    ends = [dataclasses.replace(one, tokens=one.tokens[:2], response_mask=one.response_mask[:2]) for one in hidden]
    mixed = [[*samples[:3], *stand_ins[3:]] for stand_ins in (hidden, ends)]
    expected, metrics = update(whole, config, mixed[0]), update(short, config, mixed[1])
    assert metrics.keys() == expected.keys()
    for name in ("loss", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert metrics["grad_norm"] > 0
    metrics = update(short, config, ends)
    assert metrics["skipped_backward"] == 1 and "mismatch_mean" not in metrics
    short.forward_backward(plan(short, config, ends), build_loss(config.loss))
    assert short.optim_step(1e-3)["grad_norm"] == 0


def observed(model: Any, config: RunConfig, samples: list[Sample]) -> tuple[list[int], dict, dict[str, float]]:
    """Update once with a learning rate of 0: return the sizes of the batches, the gradient and the metrics."""
    sizes, gradients = [], []
    pack, step = model.pack, model.optim_step
    model.pack = lambda part, *rest: sizes.append(len(part)) or pack(part, *rest)
    model.optim_step = lambda rate: gradients.append(model.gradients()) or step(0.0)
    metrics = update(model, config, samples)
    del model.pack, model.optim_step
    return sizes, gradients[0], metrics


def mixed_signal(folder: str) -> None:
    """Check that the samples without signal change nothing by skipping the backward pass, and are dropped by choice."""
    from megarl.parallel.groups import leave_layout

    for loss in ({"name": "grpo"}, {"name": "cispo", "aggregation": "constant"}, {"name": "gspo"}):
        leave_layout()
        model, config, _ = build(Path(folder), **loss)
        drops = config.model_copy(update={"loss": config.loss.model_copy(update={"groups_without_signal": "drop"})})
        draw = np.random.default_rng(2)
        # Off policy, so that ratios and corrections differ from 1. The first group lacks signal, and one sample of the
        # second.
        mixed = [
            dataclasses.replace(
                sample,
                advantage=0.0 if index <= GROUP else sample.advantage,
                sampler_logprobs=sample.sampler_logprobs + draw.normal(0, 0.5, drawn).astype(np.float32),
                old_logprobs=sample.sampler_logprobs + draw.normal(0, 0.3, drawn).astype(np.float32),
            )
            for index, sample in enumerate(rollout(model, config, 1))
            for drawn in [len(sample.sampler_logprobs)]
        ]
        for how, all_samples in ((config, mixed), (drops, mixed[GROUP:])):
            whole = model.forward_backward(plan(model, config, all_samples), build_loss(config.loss))
            expected = model.gradients()
            model.optim_step(0.0)
            sizes, gradient, metrics = observed(model, how, mixed)
            assert sizes == [GROUP - 1, len(all_samples) - GROUP + 1]
            assert metrics["skipped_backward"] == 0
            off = {n: (v, metrics[n]) for n, v in whole.items() if not abs(v - metrics[n]) <= 1e-6 * max(abs(v), 0.1)}
            own = {"grad_norm", "grad_tensors", "adapter_tensors", "learning_rate", "skipped_backward"}
            assert not off and set(whole) == set(metrics) - own, off
            scale = max(float(g.abs().max()) for g in expected.values())
            assert scale > 1e-4
            worst = max(float((gradient[n] - g).abs().max()) for n, g in expected.items())
            assert worst <= 1e-6 * scale, (loss, worst, scale)


def added(model: Any, trainer: RankTrainer, parts: list[list[Sample]]) -> tuple[dict, dict[str, float]]:
    """Do one optimizer step in several calls with a learning rate of 0: return the gradient and the metrics."""
    for part in parts:
        others = [sample for other in parts if other is not part for sample in other]
        trainer.forward_backward(part, tokens_of(others), part is parts[-1])
    gradients, metrics = model.gradients(), trainer.optim_step(0.0)
    return gradients, {name: value for name, value in metrics.items() if not name.endswith("_seconds")}


def in_parts(folder: str) -> None:
    """Check that several calls add up to one, for every aggregation, and that a failed one is not forgotten."""
    from megarl.parallel.groups import leave_layout

    for aggregation in ("token_mean", "sequence_mean", "constant"):
        leave_layout()
        model, config, _ = build(Path(folder), train=OVERLAP, aggregation=aggregation)
        trainer = RankTrainer(model, build_loss(config.loss), config)
        samples = rollout(model, config, 4)
        whole, expected = added(model, trainer, [samples])
        sums, metrics = added(model, trainer, [samples[:GROUP], samples[GROUP:]])
        largest = max(float(gradient.abs().max()) for gradient in whole.values())
        assert max(float((sums[name] - whole[name]).abs().max()) for name in whole) <= 1e-6 * largest
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    long = config.train.micro_batch_tokens + 2
    with pytest.raises(MegarlError, match=r"more than train\.micro_batch_tokens"):
        trainer.forward_backward([Sample(np.zeros(long, dtype=np.int64), np.arange(long) > 0)])
    for call in (lambda: trainer.optim_step(1e-3), lambda: trainer.forward_backward(samples)):
        with pytest.raises(MegarlError, match="forward_backward failed"):
            call()


def against_the_start(folder: str) -> dict[str, Any]:
    from megarl.parallel.groups import leave_layout

    model, config, start = build(Path(folder), kl_coef=0.1)
    samples = rollout(model, config, 0)
    before = model.forward(plan(model, config, samples), adapter=REFERENCE)
    results = {"start": [update(model, config, rollout(model, config, step))["kl"] for step in range(3)]}
    after = model.forward(plan(model, config, samples), adapter=REFERENCE)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    now = model.forward(model.pack(samples))
    assert not all(np.array_equal(a, s.sampler_logprobs) for a, s in zip(now, samples, strict=True))
    check_start(start, start, config)
    # Without signal, the penalty still has a gradient.
    assert update(model, config, rollout(model, config, 3, 0.0))["skipped_backward"] == 0
    leave_layout()
    model, config, nothing = build(Path(folder), kl_coef=0.1, reference="base")
    assert REFERENCE not in model.adapters and not nothing
    results["base"] = [update(model, config, rollout(model, config, 0))["kl"]]
    base = model.forward(plan(model, config, samples), adapter=False)
    results["by hand"] = np.concatenate(base) - np.concatenate([s.sampler_logprobs for s in samples])
    return results | {"saved": start}


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    make_adapter(tmp_path / "model", tmp_path / "adapter")
    make_adapter(tmp_path / "model", tmp_path / "dropped", lora_dropout=0.3)
    return tmp_path


def test_dropout_is_no_mismatch(folder):
    for single, several in run_ranks(with_dropout, 2, str(folder)):
        assert single["mismatch_max"] < 1e-5 and several["mismatch_max"] < 1e-5
        assert single["correction_mean"] == pytest.approx(1, abs=1e-5)
        # The dropout masks do show, in the ratio to the policy that drew.
        assert single["ratio_max"] > 1.01


def test_a_step_without_signal_is_exact_without_a_backward_pass(folder):
    run_ranks(without_signal, 2, str(folder))


def test_samples_without_signal_skip_the_backward_pass_or_are_dropped(folder):
    run_ranks(mixed_signal, 2, str(folder))


def test_calls_for_parts_of_a_step_add_up_to_one_for_the_whole(folder):
    run_ranks(in_parts, 2, str(folder))


def test_the_kl_penalty_is_against_the_start_or_the_base(folder):
    results = run_ranks(against_the_start, 2, str(folder))[0]
    assert results["start"][0] < 1e-10 < 1e-7 < results["start"][1] < results["start"][2]
    difference = results["by hand"].astype(np.float64)
    assert results["base"] == [pytest.approx(np.mean(np.expm1(difference) - difference), rel=1e-3)]
    sampler = {"max_prompt_tokens": 24, "max_response_tokens": 24}
    tree = {"model": {"path": str(folder / "model")}, "task": {"name": "arithmetic"}, "sampler": sampler}
    config = parse_config(tree)
    with pytest.raises(CheckpointError, match="no longer holds the adapter that the run started from"):
        check_start(results["saved"], {REFERENCE: "0"}, config)
