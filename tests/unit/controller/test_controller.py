# SPDX-License-Identifier: Apache-2.0
"""Test the controller's pure parts: prompt order, schedule, scoring, splitting a rollout into updates."""

import dataclasses
import json
import threading
import time
from functools import partial

import numpy as np
import pytest

from megarl.config import LossConfig, TrainConfig
from megarl.controller.recording.background import Background
from megarl.controller.rollouts.data import EncodedPrompt, PromptStream
from megarl.controller.rollouts.rewarding.judging import Rules, score
from megarl.controller.rollouts.rewarding.length_penalty import trained_scores
from megarl.controller.rollouts.rewarding.scoring import Scorer
from megarl.controller.schedule import learning_rate
from megarl.controller.updates import combine, split_groups
from megarl.errors import CheckpointError, DataError
from megarl.loss.advantages import group_advantages
from megarl.loss.aggregation import sequence_weights
from megarl.tasks.base import NOTHING, Reward
from megarl.types import Completion, Prompt, Sample


class CountingTask:
    """Prompts 0 .. size - 1; the reward is the number of characters."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Prompt(str(index), ({"role": "user", "content": f"q{index}"},))

    def reward(self, prompt, response):
        return Reward(float(len(response)), {"long": float(len(response) > 1)})


def make_stream(size=7, seed=3):
    return PromptStream(CountingTask(size), lambda prompt: np.array([int(prompt.id)]), seed)


def test_each_epoch_visits_every_prompt_once_in_another_order():
    stream = make_stream()
    first, second = ([p.prompt.id for p in stream.next(7)] for _ in range(2))
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second


def test_restored_cursor_continues_the_order_across_an_epoch():
    stream = make_stream()
    stream.next(5)
    state = json.loads(json.dumps(stream.state()))
    expected = [p.prompt.id for p in stream.next(9)]
    other = make_stream()
    other.restore(state)
    assert [p.prompt.id for p in other.next(9)] == expected


@pytest.mark.parametrize(("size", "count"), [(7, 5), (7, 7), (10, 4), (3, 2), (5, 13), (1, 4)])
def test_a_batch_across_an_epochs_end_holds_prompts_as_evenly_as_it_can(size, count):
    stream, seen, resumed = make_stream(size), [], 0
    for _ in range(40):
        state = json.loads(json.dumps(stream.state()))
        batch = [p.prompt.id for p in stream.next(count)]
        times = [batch.count(str(i)) for i in range(size)]
        assert max(times) - min(times) <= 1
        seen += batch
        other = make_stream(size)
        other.restore(state)
        assert [p.prompt.id for p in other.next(count)] == batch
        assert other.state() == stream.state()
        resumed += bool(state["held"])
    for start in range(0, len(seen) - size, size):
        assert len(set(seen[start : start + size])) == size
    assert resumed or size % count == 0 or count > size


@pytest.mark.parametrize(("size", "seed"), [(8, 3), (7, 4)])
def test_cursor_of_other_data_is_refused(size, seed):
    with pytest.raises(CheckpointError, match="resume with the same task and seed"):
        make_stream(size, seed).restore(make_stream().state())


def completion(prompt_ids, response, version=0, finish="stop"):
    response = np.array(response)
    return Completion(
        np.array(prompt_ids), response, np.zeros(len(response), np.float32), np.full(len(response), version), finish
    )


def run_score(completions, version=0, **arguments):
    prompts = [EncodedPrompt(CountingTask(3)[i], np.array([i, 9])) for i in range(len(completions))]
    return score(
        prompts,
        completions,
        Scorer(CountingTask(3), 1).score,
        lambda ids: "x" * len(ids),
        Rules(lambda r: r - r.mean(), **arguments),
        group=2,
        version=version,
    )


def test_samples_are_exactly_the_samplers_tokens():
    rollout = run_score([[completion([0, 9], [4, 5, 6]), completion([0, 9], [7])]])
    sample = rollout.samples()[0]
    assert sample.tokens.tolist() == [0, 9, 4, 5, 6]
    assert sample.response_mask.tolist() == [False, False, True, True, True]
    assert [s.advantage for s in rollout.samples()] == [1.0, -1.0]
    assert rollout.metrics()["reward"] == 2.0
    assert rollout.metrics()["task/long"] == 0.5


def test_rewards_advantages_and_lengths_have_their_spread_in_the_metrics():
    answers = [completion([0, 9], ids) for ids in ([4, 5, 6], [7])]
    rollout = run_score([answers])
    measured = dataclasses.replace(rollout, advantages=[[[np.array([2.0, 1.0, 0.0])], [-1.0]]]).metrics()
    expected = {
        "reward_min": 1.0, "reward_max": 3.0, "reward_std": 1.0,
        "advantage": 0.5, "advantage_min": -1.0, "advantage_max": 2.0, "advantage_std": np.std([2.0, 1.0, 0.0, -1.0]),
        "response_tokens": 2.0, "response_tokens_std": 1.0, "response_tokens_min": 1.0, "response_tokens_max": 3.0,
    }  # fmt: skip
    assert {name: measured[name] for name in expected} == pytest.approx(expected)


def test_advantages_are_of_the_trained_scores_and_the_reward_stays_the_tasks():
    rollout = run_score(
        [[completion([0, 9], [4, 5, 6], finish="length"), completion([0, 9], [7])]],
        scores_of=lambda scores, answers: trained_scores(scores, answers, LossConfig(truncated="zero"), 3),
    )
    assert [sample.advantage for sample in rollout.samples()] == [-0.5, 0.5]
    measured = rollout.metrics()
    assert (measured["reward"], measured["trained_reward"]) == (2.0, 0.5)


@pytest.mark.parametrize(("reward", "failed"), [(Reward(0.0, {}, ""), 0.0), (NOTHING, 1.0)])
def test_a_task_that_gives_nothing_for_no_answer_has_judged_it(reward, failed):
    answers = [completion([0, 9], [4, 5], finish="length"), completion([0, 9], [6])]
    prompts = [EncodedPrompt(CountingTask(3)[0], np.array([0, 9]))]
    rules = Rules(lambda r: r - r.mean(), mask_truncated=True)
    rollout = score(prompts, [answers], lambda _: [reward, Reward(1.0)], str, rules, group=2, version=0)
    measured = rollout.metrics()
    assert (measured.get("failed_rewards", 0.0), measured["truncated"]) == (failed / 2, (1 - failed) / 2)
    assert rollout.samples()[0].response_mask.any() == bool(failed)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_masked_completions_count_in_the_advantages_and_no_token_of_theirs_in_the_loss(aggregation):
    answers = [completion([0, 9], [4, 5, 6], finish="length"), completion([0, 9], [7, 8])]
    masked, trained = run_score([answers], mask_truncated=True).samples()
    _, kept = run_score([answers]).samples()
    assert trained.advantage == kept.advantage == -0.5  # of the rewards 3 and 2
    assert (masked.response_mask.sum(), masked.has_signal, masked.group) == (0, False, 0)
    counts = np.array([int(sample.response_mask.sum()) for sample in (masked, trained)])
    # TRL's mask_truncated_completions multiplies the completion mask: the same denominators.
    mask = np.array([[0, 0, 0], [1, 1, 0]])
    expected = {
        "token_mean": mask / mask.sum(),
        "sequence_mean": mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask),
        "constant": mask / (len(mask) * 3),
    }[aggregation]
    weights = sequence_weights(counts, aggregation, 3)
    assert (weights * counts).tolist() == pytest.approx(expected.sum(1).tolist())
    assert not any(sample.has_signal for sample in run_score([[answers[0]] * 2], mask_truncated=True).samples())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([completion([0, 9], [1])], "got 1 completions; sampler.samples_per_prompt is 2"),
        ([completion([0, 9], [1]), completion([0, 8], [1])], "other prompt tokens"),
        ([completion([0, 9], [1]), completion([0, 9], [])], "empty response"),
        ([completion([0, 9], [1]), completion([0, 9], [1], version=4)], "policy version 4, asked for was 0"),
    ],
)
def test_what_was_not_asked_for_is_refused(answers, message):
    with pytest.raises(DataError, match=message):
        run_score([answers])


def test_rollout_file_repeats_every_completion_exactly(tmp_path):
    rollout = run_score([[completion([0, 9], [4, 5]), completion([0, 9], [7])]])
    rollout.write(tmp_path / "rollout.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rollout.jsonl").read_text().splitlines()]
    assert [row["response_ids"] for row in rows] == [[4, 5], [7]]
    assert [row["reward"] for row in rows] == [2.0, 1.0]


def test_updates_take_whole_groups_and_every_sample_once():
    samples = [Sample(np.array([1, 2]), np.array([False, True]), group=index // 4) for index in range(20)]
    parts = split_groups(samples, 3)
    assert [item for part in parts for item in part] == samples
    assert all(len(part) % 4 == 0 for part in parts)
    assert len(parts) == 3


def test_maxima_are_not_averaged():
    assert combine([{"a": 1.0, "b_max": 1.0}, {"a": 3.0, "b_max": 5.0}]) == {"a": 2.0, "b_max": 5.0}


def test_a_run_shorter_than_its_warmup_makes_the_beginning_of_the_rise():
    config = TrainConfig(steps=2, learning_rate=1.0, warmup_steps=5, schedule="cosine")
    assert [learning_rate(update, config) for update in range(2)] == pytest.approx([0.2, 0.4])


def test_learning_rate_warms_up_and_ends_as_the_schedule_says():
    config = TrainConfig(steps=10, learning_rate=1.0, warmup_steps=2, schedule="linear")
    rates = [learning_rate(i, config) for i in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 8)
    cosine = TrainConfig(steps=10, learning_rate=1.0, schedule="cosine")
    assert learning_rate(5, cosine) == pytest.approx(0.5)
    assert learning_rate(10, cosine) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_and_schedule_take_as_many_steps_whatever_the_updates_of_a_step(schedule):
    config = TrainConfig(steps=8, learning_rate=1.0, warmup_steps=4, schedule=schedule)
    several = config.model_copy(update={"updates_per_step": 5})
    assert learning_rate(5 * 4 - 1, several) == 1.0 > learning_rate(5 * 4 - 2, several)
    for step in range(1, 9):
        last, first = learning_rate(5 * step - 1, several), learning_rate(5 * step - 5, several)
        assert min(first, last) <= learning_rate(step - 1, config) <= max(first, last)


@pytest.mark.parametrize(("size", "reward"), [(6, 0.1), (10, 0.6), (12, 0.1), (12, 0.7), (7, 1e30)])
def test_groups_without_signal_are_those_whose_rewards_are_equal(size, reward):
    def rollout(rewards):
        group = [completion([0, 9], [1, 2]) for _ in rewards]
        task = CountingTask(3)
        given = iter(rewards)
        task.reward = lambda prompt, response: Reward(next(given))
        prompts = [EncodedPrompt(task[0], np.array([0, 9]))]
        advantages = partial(group_advantages, scale="std")
        return score(
            prompts,
            [group],
            Scorer(task, 1).score,
            lambda ids: "",
            Rules(advantages),
            group=len(group),
            version=0,
        )

    assert rollout([reward] * size).metrics()["groups_without_signal"] == 1
    assert rollout([reward] * (size - 1) + [np.nextafter(reward, 0)]).metrics()["groups_without_signal"] == 0


def test_prompts_encoded_ahead_are_those_that_come_next():
    plain, ahead, threads = make_stream(7), make_stream(7), set()
    encode = ahead.encode
    ahead.encode = lambda prompt: threads.add(threading.current_thread()) or encode(prompt)
    for count in (3, 3, 3, 5, 2, 9, 3):
        state = ahead.state()
        ahead.prepare(3)
        assert ahead.state() == state
        assert [p.prompt.id for p in ahead.next(count)] == [p.prompt.id for p in plain.next(count)]
        assert ahead.state() == plain.state()
    assert len(threads) == 2  # the caller encodes what was not prepared


def test_a_prompt_that_cannot_be_encoded_ahead_is_an_error_when_it_is_asked_for():
    stream = make_stream()
    stream.encode = lambda prompt: 1 / 0
    stream.prepare(2)
    with pytest.raises(ZeroDivisionError):
        stream.next(2)


def test_background_work_is_timed_and_its_error_is_raised_where_it_is_waited_for(tmp_path):
    background, done = Background("test"), []
    assert background.wait() == 0
    background.start(lambda: time.sleep(0.1) or done.append(1))
    background.start(lambda: done.append(2))  # waits for the first
    assert 0 <= background.wait() < 0.1 and done == [1, 2]
    background.start(lambda: time.sleep(0.1))
    assert background.wait() >= 0.1
    background.start(lambda: (tmp_path / "none" / "file").write_text(""))
    with pytest.raises(FileNotFoundError):
        background.wait()
    assert background.wait() == 0
