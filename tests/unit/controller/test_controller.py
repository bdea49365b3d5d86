"""The controller's pure parts: prompt order, schedule, scoring, splitting a rollout into updates."""

import json

import numpy as np
import pytest

from megarl.config import TrainConfig
from megarl.controller.data import EncodedPrompt, PromptStream
from megarl.controller.rollout import score
from megarl.controller.schedule import learning_rate
from megarl.controller.updates import combine, split_groups
from megarl.errors import CheckpointError, DataError
from megarl.tasks.base import Reward
from megarl.types import Completion, Prompt


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


@pytest.mark.parametrize(("size", "seed"), [(8, 3), (7, 4)])
def test_cursor_of_other_data_is_refused(size, seed):
    with pytest.raises(CheckpointError, match="resume with the same task and seed"):
        make_stream(size, seed).restore(make_stream().state())


def completion(prompt_ids, response, version=0, finish="stop"):
    response = np.array(response)
    return Completion(
        np.array(prompt_ids), response, np.zeros(len(response), np.float32), np.full(len(response), version), finish
    )


def run_score(completions, version=0):
    prompts = [EncodedPrompt(CountingTask(3)[i], np.array([i, 9])) for i in range(len(completions))]
    return score(
        prompts,
        completions,
        CountingTask(3),
        lambda ids: "x" * len(ids),
        lambda r: r - r.mean(),
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
    parts = split_groups(list(range(20)), 3, 4)
    assert [item for part in parts for item in part] == list(range(20))
    assert all(len(part) % 4 == 0 for part in parts)
    assert len(parts) == 3


def test_maxima_are_not_averaged():
    assert combine([{"a": 1.0, "b_max": 1.0}, {"a": 3.0, "b_max": 5.0}]) == {"a": 2.0, "b_max": 5.0}


def test_learning_rate_warms_up_and_ends_as_the_schedule_says():
    config = TrainConfig(steps=10, learning_rate=1.0, warmup_steps=2, schedule="linear")
    rates = [learning_rate(i, config) for i in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 8)
    cosine = TrainConfig(steps=10, learning_rate=1.0, schedule="cosine")
    assert learning_rate(5, cosine) == pytest.approx(0.5)
    assert learning_rate(10, cosine) == pytest.approx(0.0)
