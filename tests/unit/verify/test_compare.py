# SPDX-License-Identifier: Apache-2.0
"""Test the rule of ``megarl.verify`` on made-up numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from megarl.verify.bounds import (
    ADAPTER,
    BASE_LOGPROBS,
    BASE_WEIGHTS,
    BOUNDS,
    CHECKPOINT,
    EACH_GRADIENT,
    GRADIENTS,
    LOGPROBS,
    MERGED_WEIGHTS,
    PEFT_LOAD,
    UPDATE,
)
from megarl.verify.compare import Finding, Outcome, Rule, compare, compare_adapters, worst_of

FP32, BF16 = Rule.of("float32", routers=False), Rule.of("bfloat16", routers=False)


@pytest.fixture
def truth():
    """Return two tensors with made-up gradients and three updates."""
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in "ab"}
    moved = {name: tensor + 1e-3 * torch.randn(4, 6, generator=generator) for name, tensor in start.items()}
    gradients = {name: torch.randn(4, 6, generator=generator) for name in "ab"}
    logprobs = [-np.arange(1.0, 5.0), -np.ones(3)]
    return Outcome(logprobs, logprobs, 2.0, gradients, [1.0, 0.9, 0.8], moved, start)


def rows_of(actual, truth, rule):
    return {finding.row: finding for finding in compare(actual, truth, rule)}


def test_equal_outcomes_have_no_error_in_any_row(truth):
    for rule in (FP32, BF16):
        assert {finding.error for finding in compare(truth, truth, rule)} == {0.0}


def test_the_worst_tensor_is_named_with_its_own_relative_error(truth):
    wrong = truth.gradients | {"b": truth.gradients["b"].clone()}
    wrong["b"][1, 2] += 0.01 * wrong["b"].abs().max()
    finding = rows_of(dataclasses.replace(truth, gradients=wrong), truth, FP32)[GRADIENTS]
    assert (finding.worst, finding.error) == ("b", pytest.approx(0.01, rel=1e-4))


def test_an_update_is_measured_against_how_far_the_adapter_moved(truth):
    half = {name: (tensor + truth.start[name]) / 2 for name, tensor in truth.adapter.items()}
    actual = dataclasses.replace(truth, adapter=half)
    assert rows_of(actual, truth, FP32)[UPDATE].error == pytest.approx(0.5)
    assert rows_of(actual, truth, BF16)[UPDATE].error == pytest.approx(0.5)
    assert rows_of(actual, truth, FP32)[ADAPTER].error < 2e-3


@pytest.mark.parametrize(("change", "worst"), [({"a": None}, "a (missing)"), ({"c": 1}, "c (unexpected)")])
def test_a_tensor_on_one_side_only_is_an_infinite_error(truth, change, worst):
    gradients = {n: t for n, t in (truth.gradients | change).items() if t is not None}
    finding = rows_of(dataclasses.replace(truth, gradients=gradients), truth, FP32)[GRADIENTS]
    assert (finding.worst, finding.error) == (worst, math.inf)


def test_another_shape_is_an_infinite_error_and_names_both(truth):
    gradients = truth.gradients | {"a": torch.zeros(2, 6)}
    for rule in (FP32, BF16):
        finding = rows_of(dataclasses.replace(truth, gradients=gradients), truth, rule)[GRADIENTS]
        assert (finding.worst, finding.error) == ("a [2, 6] for [4, 6]", math.inf)


def test_nan_never_passes(truth):
    gradients = truth.gradients | {"a": torch.full((4, 6), math.nan)}
    for rule in (FP32, BF16):
        finding = rows_of(dataclasses.replace(truth, gradients=gradients), truth, rule)[GRADIENTS]
        assert finding.worst == "a"
        assert rule.needs_yardstick(finding)
        assert not rule.judge(finding, yardstick_error=1e9).passed
        assert not rule.judge(finding, yardstick_error=math.nan).passed


def test_the_fixed_bound_decides_unless_hugging_face_itself_misses_it():
    finding = Finding(ADAPTER, "a", 3e-4)
    assert not FP32.judge(finding, yardstick_error=1e-5).passed
    assert not FP32.judge(finding, yardstick_error=0.7e-4).passed
    row = FP32.judge(finding, yardstick_error=0.8e-4)
    assert (row.passed, row.bound) == (True, 3.2e-4)


def test_bf16_is_judged_by_hugging_faces_bf16_alone():
    finding = Finding(LOGPROBS, "sample 0", 1e-3)
    assert BF16.judge(finding, yardstick_error=0.92e-3).passed
    assert not BF16.judge(finding, yardstick_error=0.9e-3).passed
    assert not BF16.judge(finding, yardstick_error=0.0).passed


@pytest.mark.parametrize("rule", [FP32, BF16])
@pytest.mark.parametrize("row", [LOGPROBS, GRADIENTS, UPDATE, PEFT_LOAD, MERGED_WEIGHTS])
def test_no_yardstick_excuses_a_lost_tensor(rule, row):
    for yardstick_error in (0.9, 9.6, math.inf, math.nan):
        assert not rule.judge(Finding(row, "a", 1.0), yardstick_error=yardstick_error).passed


def test_each_gradient_is_judged_alone_in_bf16(truth):
    lost = truth.gradients | {"a": torch.zeros(4, 6)}
    small = lost | {"a": truth.gradients["a"] * 1e-3}
    expected = dataclasses.replace(truth, gradients=small)
    finding = rows_of(dataclasses.replace(truth, gradients=lost), expected, BF16)[EACH_GRADIENT]
    assert (finding.worst, finding.error) == ("a", 1.0)
    assert rows_of(dataclasses.replace(truth, gradients=lost), expected, BF16)[GRADIENTS].error < 2e-3
    assert not BF16.judge_each(finding, {"a": 0.4, "b": 0.1}).passed
    assert BF16.judge_each(Finding(EACH_GRADIENT, "a", 0.3, {"a": 0.3, "b": 0.0}), {"a": 0.11, "b": 0.1}).passed
    assert EACH_GRADIENT not in rows_of(truth, truth, FP32)


def test_a_gradient_that_is_noise_in_hugging_face_too_is_left_out_and_counted(truth):
    finding = Finding(EACH_GRADIENT, "a", 1.0, {"a": 1.0, "b": 0.2})
    row = BF16.judge_each(finding, {"a": 0.6, "b": 0.1})
    assert (row.passed, row.error) == (True, 0.2)
    assert row.worst == "b (1 of 2 left out: Hugging Face's are noise)"
    assert not BF16.judge_each(finding, {"a": 0.6, "b": 0.6}).passed


def test_exact_rows_stay_exact():
    for rule in (FP32, BF16):
        assert rule.judge(Finding(BASE_WEIGHTS, "w", 0.0), yardstick_error=0.0).passed
        assert not rule.judge(Finding(BASE_WEIGHTS, "w", 1e-30), yardstick_error=0.0).passed


def test_a_reloaded_checkpoint_is_judged_as_what_was_trained_in_one_go():
    errors = {ADAPTER: 1.0, UPDATE: 2.0}
    assert (FP32.yardstick(CHECKPOINT, errors), BF16.yardstick(CHECKPOINT, errors)) == (1.0, 2.0)


def test_in_float32_logprobs_are_judged_by_hugging_faces_worst_ones():
    errors = {LOGPROBS: 1.0, BASE_LOGPROBS: 3.0, PEFT_LOAD: 2.0, GRADIENTS: 9.0}
    assert (FP32.yardstick(PEFT_LOAD, errors), BF16.yardstick(PEFT_LOAD, errors)) == (3.0, 2.0)
    assert FP32.yardstick(MERGED_WEIGHTS, errors) == 0.0


def test_what_adamw_makes_of_rounding_is_not_counted_element_by_element():
    start, adapter = {"a": torch.zeros(2)}, {"a": torch.tensor([1.0, -1.0])}
    truth = Outcome([], [], 0.0, {}, [], adapter, start, leeway={"a": torch.tensor([0.25, 0.0])})
    elements, whole = compare_adapters({"a": torch.tensor([0.8, -1.0])}, truth, FP32)
    assert elements.error == 0.0
    assert whole.error == pytest.approx(0.2 / 2**0.5)
    assert compare_adapters({"a": torch.tensor([1.5, -1.0])}, truth, FP32)[0].error == pytest.approx(0.25)
    assert compare_adapters({"a": torch.tensor([1.0, -1.25])}, truth, FP32)[0].error == pytest.approx(0.25)


def test_of_several_ranks_the_worst_is_kept_in_the_reports_order():
    findings = [Finding(GRADIENTS, "a", 1e-6), Finding(LOGPROBS, "s", 1e-7), Finding(GRADIENTS, "b", math.nan)]
    findings.append(Finding(GRADIENTS, "c", 5.0))
    kept = worst_of(findings)
    assert [finding.row for finding in kept] == [LOGPROBS, GRADIENTS]
    assert kept[1].worst == "b"
    assert next(iter(BOUNDS)) == LOGPROBS
