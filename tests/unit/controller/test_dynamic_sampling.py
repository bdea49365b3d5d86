# SPDX-License-Identifier: Apache-2.0
"""Draw prompts until enough have signal, resume between such steps, and drop groups without signal from an update."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config import parse_config
from megarl.controller import loop
from megarl.controller.actors.updates import divide, total
from megarl.controller.rollouts.dynamic_sampling import dropped_groups
from megarl.controller.state import RunState
from megarl.loss import build_loss
from megarl.tasks.base import Reward
from megarl.types import Completion, Sample
from tests.helpers.prompts import number_stream

WANTED, FACTOR, PROMPTS = 4, 3, 50


def make_config(**loss):
    return parse_config(
        {
            "model": {"path": "model"},
            "task": {"name": "arithmetic"},
            "loss": loss,
            "sampler": {"samples_per_prompt": 2},
            "train": {"prompts_per_step": WANTED, "max_resample_factor": FACTOR},
        }
    )


def make_state(every, choice="resample", finish_reason="stop", truncated="keep"):
    """Return a loop in which the two completions of every ``every``-th prompt have different rewards."""

    def generate(prompts, version, seeds):
        response = (np.array([5, 6]), np.zeros(2, np.float32), np.full(2, version), finish_reason)
        return [[Completion(ids, *response) for _ in range(2)] for ids in prompts]

    def score(groups, check):
        return [Reward(float(i and int(prompt.id) % every == 0)) for prompt, group in groups for i in range(len(group))]

    return RunState(
        config=make_config(groups_without_signal=choice, truncated=truncated),
        trainers=SimpleNamespace(check=None),
        samplers=SimpleNamespace(generate=generate),
        manager=None,
        judge=SimpleNamespace(score=score),
        stream=number_stream(PROMPTS),
        decode=lambda ids: "",
        recorder=SimpleNamespace(phase=lambda name: None),
        staff=SimpleNamespace(restarts={"engine": 0, "trainer": 0}),
    )


def ids_of(rollout):
    return [int(prompt.prompt.id) for prompt in rollout.prompts]


def test_prompts_are_drawn_until_enough_have_signal():
    rollout, in_order = loop.collect(make_state(every=2)), ids_of(loop.draw(make_state(every=2), PROMPTS))
    drawn = ids_of(rollout)
    assert drawn == in_order[: len(drawn)] and WANTED < len(drawn) < FACTOR * WANTED
    with_signal = [index for index, number in enumerate(drawn) if number % 2 == 0]
    assert rollout.trained == with_signal and len(with_signal) == WANTED
    assert [sample.group for sample in rollout.samples()] == [index for index in with_signal for _ in range(2)]
    assert all(sample.has_signal for sample in rollout.samples())
    assert dropped_groups(rollout, make_config(groups_without_signal="resample")) == set(range(len(drawn))) - set(
        with_signal
    )
    assert rollout.metrics()["groups_without_signal"] == pytest.approx(1 - WANTED / len(drawn))


def test_at_the_limit_the_step_is_filled_up_with_groups_that_the_update_drops():
    state = make_state(every=10)
    rollout = loop.collect(state)
    drawn = ids_of(rollout)
    with_signal = [index for index, number in enumerate(drawn) if number % 10 == 0]
    assert len(drawn) == FACTOR * WANTED and 0 < len(with_signal) < WANTED
    assert len(rollout.trained) == WANTED and set(with_signal) < set(rollout.trained)
    trained, measured = divide(rollout.samples(), build_loss(state.config.loss), state.config)
    assert sorted({sample.group for sample in trained}) == with_signal and not measured


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_masked_completion_gives_its_group_no_signal(finish_reason):
    rollout = loop.collect(make_state(every=1, choice="drop", finish_reason=finish_reason, truncated="mask"))
    assert rollout.signals == [finish_reason == "stop"] * WANTED
    # Half of the completions are above their group's mean.
    assert [np.sign(advantage).ravel().tolist() for advantage in rollout.advantages] == [[-1, 1]] * WANTED


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_without_resampling_a_step_draws_its_prompts_once(choice):
    state = make_state(every=10, choice=choice)
    rollout = loop.collect(state)
    assert len(rollout.prompts) == WANTED and len(rollout.samples()) == 2 * WANTED
    assert len(dropped_groups(rollout, state.config)) == {"keep": 0, "drop": rollout.signals.count(False)}[choice]


def test_a_resumed_run_draws_the_same_prompts():
    straight, first, second = (make_state(every=3) for _ in range(3))
    expected = [loop.collect(straight) for _ in range(4)]
    drawn = [loop.collect(first) for _ in range(2)]
    second.restore(json.loads(json.dumps(first.to_json())))
    drawn += [loop.collect(second) for _ in range(2)]
    assert [ids_of(rollout) for rollout in drawn] == [ids_of(rollout) for rollout in expected]
    assert [rollout.trained for rollout in drawn] == [rollout.trained for rollout in expected]


def sample(advantage, group):
    return Sample(np.array([1, 2, 3]), np.array([False, True, True]), advantage=advantage, group=group)


# Groups of two: without signal, with signal in one sample, with signal in both.
SAMPLES = [sample(advantage, index // 2) for index, advantage in enumerate([0.0, 0.0, 1.0, 0.0, 1.0, -1.0])]


@pytest.mark.parametrize(
    ("loss", "trained", "measured"),
    [
        ({}, [2, 4, 5], [0, 1, 3]),
        ({"groups_without_signal": "drop"}, [2, 4, 5], [3]),
        ({"kl_coef": 0.1}, [0, 1, 2, 3, 4, 5], []),
        ({"kl_coef": 0.1, "groups_without_signal": "drop"}, [2, 3, 4, 5], []),
    ],
)
def test_an_update_trains_on_samples_whose_gradient_may_differ_from_zero(loss, trained, measured):
    config = make_config(**loss)
    chosen = divide(SAMPLES, build_loss(config.loss), config)
    assert [[index for index, s in enumerate(SAMPLES) if any(s is c for c in part)] for part in chosen] == [
        trained,
        measured,
    ]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_an_update_whose_groups_are_all_dropped_is_only_measured(kl_coef):
    config = make_config(groups_without_signal="drop", kl_coef=kl_coef)
    assert divide(SAMPLES[:2], build_loss(config.loss), config) == ([], SAMPLES[:2])


def test_a_loss_that_does_not_vanish_without_advantages_trains_on_all_samples():
    assert divide(SAMPLES, object(), make_config()) == (SAMPLES, [])


def test_the_passes_of_an_update_add_up():
    assert total([{"a": 1.0, "b_max": 3.0}, {"a": 0.5, "b_max": 2.0, "c": 1.0}]) == {"a": 1.5, "b_max": 3.0, "c": 1.0}
