# SPDX-License-Identifier: Apache-2.0
"""Test the metrics of an evaluation against numbers worked out by hand, and what is refused."""

import numpy as np
import pytest

from megarl.config.sections.eval import EvalTaskConfig, Sampling
from megarl.errors import ConfigError, RewardError
from megarl.evaluation import table
from megarl.evaluation.results import check_reward, measure
from megarl.evaluation.sets import EvalSet
from megarl.tasks.base import NOTHING, Reward
from megarl.types import Prompt


def measured(rewards, **config):
    section = EvalTaskConfig(name="sums", **config)
    prompts = [Prompt(str(index), ()) for index in range(len(rewards))]
    one = EvalSet(section, Sampling(len(rewards[0]), 1.0, 1.0, 8), None, prompts, [np.zeros(1)] * len(prompts))
    lengths = np.arange(len(rewards) * len(rewards[0])).reshape(len(rewards), -1)
    return measure(one, rewards, lengths, lengths > 2)


def of(answer, right, score=None):
    return Reward(float(right) if score is None else score, {"correct": float(right)}, answer)


def test_metrics_are_means_over_prompts():
    groups = [
        [of("7", 1), of("7", 1), of("8", 0), of("", 0)],
        [of("3", 0), of("3", 0), of("4", 1), of("5", 0, 0.25)],
    ]
    result = measured(groups, metrics=["pass@1", "pass@2", "maj@4", "maj@1"])
    value = {name: estimate.value for name, estimate in result.estimates.items()}
    # 3 of 8 are right. pass@2: 1 - C(2, 2) / C(4, 2) and 1 - C(3, 2) / C(4, 2).
    assert value["correct"] == value["pass@1"] == value["maj@1"] == pytest.approx(3 / 8)
    assert value["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert value["maj@4"] == 0.5
    assert value["reward"] == pytest.approx(3.25 / 8)
    assert (value["response_tokens"], value["truncated"]) == (3.5, 5 / 8)
    row = result.row()
    assert row["eval/sums/pass@2_low"] < row["eval/sums/pass@2"] < row["eval/sums/pass@2_high"]
    assert result.to_json()["metrics"]["maj@4"]["value"] == 0.5


def test_right_may_be_a_reward_of_one():
    groups = [[Reward(1.0), Reward(0.6)], [Reward(0.6), Reward(0.0)]]
    assert measured(groups, metrics=["pass@1"], right="reward").estimates["pass@1"].value == 0.25


def test_a_metric_that_only_some_completions_have_is_the_mean_of_those():
    groups = [[Reward(1.0, {"length": 3.0}), Reward(1.0)], [Reward(1.0), Reward(1.0)]]
    estimate = measured(groups).estimates["length"]
    assert (estimate.value, estimate.low) == (3.0, None)


def test_what_could_not_be_judged_is_not_right_and_has_no_other_metric():
    groups = [[of("7", 1), NOTHING], [Reward(1.0, {"correct": 1.0, "calls": 2.0}, "7"), NOTHING]]
    value = {name: estimate.value for name, estimate in measured(groups, metrics=["pass@1"]).estimates.items()}
    assert value["correct"] == value["pass@1"] == 0.5 and value["calls"] == 2.0


@pytest.mark.parametrize(
    ("config", "reward", "error", "message"),
    [
        (
            {"metrics": ["pass@1"]},
            Reward(1.0),
            ConfigError,
            r"pass@1 needs the reward's metric 'correct' \(it gives none",
        ),
        ({"metrics": ["pass@1"], "right": "exakt"}, of("1", 1), ConfigError, r"'exakt' \(it gives: correct\)"),
        ({"metrics": ["maj@1"], "right": "reward"}, Reward(1.0), ConfigError, "maj@1 needs the answer of each"),
        ({"metrics": ["pass@1"]}, Reward(1.0, {"correct": 0.5}), RewardError, "metric 'correct' is 0.5, but says what"),
    ],
)
def test_rewards_that_do_not_say_what_is_right_are_refused(config, reward, error, message):
    with pytest.raises(error, match=message):
        measured([[reward]], **config)
    check_reward(EvalTaskConfig(name="sums"), reward)


def test_targets_are_compared_prompt_by_prompt():
    draw = np.random.default_rng(0)
    base = draw.integers(0, 2, 40)
    better = np.maximum(base, draw.integers(0, 2, 40) * draw.integers(0, 2, 40))
    results = {
        f"runs/{name}": {"sums": measured([[of("1", hit)] for hit in hits])}
        for name, hits in (("base", base), ("better", better))
    }
    change = table.differences(results["runs/base"], results["runs/better"])["sums"]["correct"]
    assert change.value == pytest.approx((better - base).mean())
    assert 0.0 < change.low < change.value < change.high
    head, lines = table.rows(results)
    assert head == ["set", "metric", "base", "better", "better - first"]
    assert next(line for line in lines if line[1] == "correct")[-1] == change.text("{:+.3f}")
    told = table.as_json(results)["runs/better"]["difference_to_first"]["sums"]["correct"]
    assert told == {"value": change.value, "low": change.low, "high": change.high}


def test_only_prompts_that_both_targets_answered_are_compared():
    """Two tokenizers may leave out other prompts (``task.long_prompts: drop``)."""
    first, other = ({"sums": measured([[of("1", hit)] for hit in hits])} for hits in ([1, 0, 1], [1, 1, 1]))
    names = ("a", "b", "c"), ("b", "c", "d")
    for each, named in zip((first, other), names, strict=True):
        each["sums"].measured.prompts[:] = [Prompt(name, ()) for name in named]
    # b: 1 against 0; c: 1 against 1.
    assert table.differences(first, other)["sums"]["correct"].value == 0.5
    other["sums"].measured.prompts[:] = [Prompt(name, ()) for name in "xyz"]
    assert table.differences(first, other) == {}


def test_differences_come_in_the_order_of_the_sets():
    names = "hgfedcba"
    first, other = ({name: measured([[of("1", hit)]]) for name in names} for hit in (0, 1))
    assert list(table.differences(first, other)) == list(names)
