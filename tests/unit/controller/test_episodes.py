# SPDX-License-Identifier: Apache-2.0
"""Test the process that plays episodes: turns, seeds and versions reach it and return; what hangs or dies is named."""

import time
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.config import LossConfig, TaskConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.playing import episode_process
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.rewarding.judging import Rules, judge
from megarl.errors import ConfigError, DataError, EpisodeError, WorkerError
from megarl.loss.advantages import group_advantages
from megarl.sampler.seeds import seed_from
from megarl.tasks import TaskContext
from megarl.types import Completion, Prompt

ENVIRONMENT = """
import asyncio, os, sys, time
import numpy as np
from megarl.environments import Chat
from megarl.tasks import Reward
from megarl.types import Prompt


class Scene:
    def __init__(self, context):
        pass

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Prompt(f"p{index}", ({"role": "user", "content": "q"},), {"index": index})

    async def rollout(self, prompt, client):
        return await getattr(self, prompt.data["plot"])(prompt, client)

    async def two_turns(self, prompt, client):
        chat = Chat(client)
        first = await chat.sample()
        chat.add({"role": "user", "content": "x"})
        second = await chat.sample()
        return client.trajectory(Reward(float(first.ids[0]), {"index": prompt.data["index"]}))

    async def branches(self, prompt, client):
        turns = [await client.sample(client.prompt_ids) for _ in range(3)]
        return client.trajectory(1.0, rewards=[float(turn.ids[0]) for turn in turns])

    async def per_token(self, prompt, client):
        await Chat(client).sample()
        [one] = client.sequences()
        return client.trajectory(1.0, advantages=[np.arange(len(one.logprobs)) - 1])

    async def nothing(self, prompt, client):
        return client.trajectory(1.0)

    async def blocks(self, prompt, client):
        await Chat(client).sample()
        time.sleep(1000)

    async def crashes(self, prompt, client):
        await Chat(client).sample()
        os.abort()

    async def waits(self, prompt, client):
        await Chat(client).sample()
        await asyncio.sleep(1000)
"""
IDS = np.array([1, 86, 0, 2])
SAMPLING = Sampling(2, 1.0, 1.0, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scene")
    make_tokenizer(path)
    (path / "scene.py").write_text(ENVIRONMENT)
    return path


def begin(folder, **settings):
    context = TaskContext(TaskConfig(**{"name": "scene.py:Scene"} | settings), folder, 0)
    return EpisodeProcess(context, folder / "logs" / "rewards.log", str(folder))


@pytest.fixture(scope="module")
def process(folder):
    """Return a process that plays any plot; starting one takes seconds."""
    process = begin(folder, episode_seconds=2.0)
    yield process
    process.close()


def prompts(plot, count=1):
    messages = ({"role": "user", "content": "q"},)
    return [EncodedPrompt(Prompt(f"p{i}", messages, {"index": i, "plot": plot}), IDS) for i in range(count)]


class Engine:
    """Answers a turn by tokens made of its seed, at a version of its choice."""

    def __init__(self, version=7, error=None):
        self.version, self.error, self.asked = version, error, []

    def ask(self, name, ids, seed, sampling):
        self.asked.append((name, ids.tolist(), seed, sampling))
        future = Future()
        if self.error:
            future.set_exception(self.error)
        else:
            drawn = np.array([5 + seed % 90, 5 + seed % 7, 0])
            versions = np.full(3, self.version)
            future.set_result(Completion(ids, drawn, np.full(3, -0.5, np.float32), versions, "stop"))
        return future


def play(process, plot, engine=None, count=1, look=lambda: None):
    engine = engine or Engine()
    asks = [partial(engine.ask, f"p{i}") for i in range(count)]
    return process.play(prompts(plot, count), asks, [100 + i for i in range(count)], SAMPLING, look)


def test_every_turn_has_a_seed_of_its_prompt_sample_and_turn_and_results_are_in_order(process):
    engine = Engine()
    played = play(process, "two_turns", engine, 3)
    expected = {(f"p{i}", seed_from(100 + i, j, t)) for i in range(3) for j in range(2) for t in range(2)}
    assert len(expected) == 12 and {(name, seed) for name, _, seed, _ in engine.asked} == expected
    assert {sampling.samples for *_, sampling in engine.asked} == {1}
    for i, group in enumerate(played):
        for j, one in enumerate(group):
            [sequence] = one.trajectory.sequences
            seeds = [seed_from(100 + i, j, t) for t in range(2)]
            drawn = [token for seed in seeds for token in (5 + seed % 90, 5 + seed % 7, 0)]
            assert sequence.response_ids[sequence.drawn].tolist() == drawn
            assert sequence.response_ids[~sequence.drawn].tolist() == [1, 93, 0, 2]  # the user's x
            assert sequence.versions.tolist() == [7] * 6
            assert one.reward.score == drawn[0] and one.reward.metrics["index"] == i
    again = play(process, "two_turns", count=3)
    assert [[one.trajectory.reward for one in group] for group in again] == [
        [one.trajectory.reward for one in group] for group in played
    ]


def rollout_of(played, version=7, **loss):
    config = LossConfig(**loss)
    rules = Rules(lambda scores: group_advantages(scores, config.advantage_scale), mask_truncated=True)
    return judge(prompts("any", len(played)), played, rules, version=version)


def test_an_episode_becomes_a_sample_whose_mask_has_holes(process, tmp_path):
    rollout = rollout_of(play(process, "two_turns"))
    for sample in rollout.samples():
        assert sample.response_mask.tolist() == [False] * 4 + [True] * 3 + [False] * 4 + [True] * 3
        assert sample.sampler_logprobs.tolist() == [-0.5] * 6
    scores = np.array([reward.score for reward in rollout.rewards[0]])
    assert [sample.advantage for sample in rollout.samples()] == pytest.approx(group_advantages(scores, "std"))
    assert rollout.signals == [True]
    assert rollout.metrics()["response_tokens"] == 6 and rollout.metrics()["episode_turns"] == 2
    with pytest.raises(DataError, match="tokens of policy version 7, asked for was 8"):
        rollout_of(play(process, "two_turns"), version=8)


def test_branches_have_advantages_of_their_own_rewards(process):
    rollout = rollout_of(play(process, "branches"))
    samples = rollout.samples()
    assert len(samples) == 6 and {sample.group for sample in samples} == {0}
    firsts = np.array([sample.tokens[4] for sample in samples], dtype=np.float64)
    assert [sample.advantage for sample in samples] == pytest.approx(group_advantages(firsts, "std"))
    assert len(rollout.trajectories[0]) == 2


def test_per_token_advantages_reach_the_samples(process):
    rollout = rollout_of(play(process, "per_token"))
    assert [sample.advantage.tolist() for sample in rollout.samples()] == [[-1.0, 0.0, 1.0]] * 2


def test_an_episode_without_a_token_is_a_sample_without_signal(process, tmp_path):
    rollout = rollout_of(play(process, "nothing"))
    assert [int(sample.response_mask.sum()) for sample in rollout.samples()] == [0, 0]
    assert rollout.metrics()["response_tokens"] == 0 and rollout.signals == [False]
    rollout.write(tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2


def test_an_episode_that_waits_too_long_ends_with_what_was_drawn(process):
    played = play(process, "waits")
    assert [(one.trajectory.finish_reason, one.reward.score) for one in played[0]] == [("time", 0.0)] * 2
    rollout = rollout_of(played)
    assert rollout.metrics()["truncated"] == 1.0 and rollout.metrics()["ended_time"] == 1.0


def test_an_environment_that_blocks_its_process_is_named(folder, monkeypatch):
    monkeypatch.setattr(episode_process, "GRACE_SECONDS", 0.5)
    process, began = begin(folder, episode_seconds=0.5), time.monotonic()
    with pytest.raises(EpisodeError, match=r"kept its process busy.*\(0.5 s\)(.|\n)*prompt 'p0'(.|\n)*rewards.log"):
        play(process, "blocks")
    assert time.monotonic() - began < 60
    process.close()


@pytest.mark.parametrize(("plot", "how"), [("crashes", "SIGABRT"), ("waits", "SIGKILL")])
def test_a_process_that_dies_is_named(folder, plot, how):
    process = begin(folder)

    def kill():
        if plot == "waits":
            process._process.kill()

    for _ in range(2):  # it stays dead
        with pytest.raises(EpisodeError, match=rf"process was killed by {how}(.|\n)*prompt 'p0'"):
            play(process, plot, look=kill)
    process.close()


def test_an_error_of_the_engines_arrives_as_it_is(process):
    with pytest.raises(WorkerError, match="sampler 0 died"):
        play(process, "two_turns", Engine(error=WorkerError("sampler 0 died")))


def test_the_dry_run_plays_an_episode_and_shows_the_environments_own_traceback(process):
    said = [38, 39, 0]
    assert process.dry_run(prompts("two_turns")[0], said).score == 38.0
    with pytest.raises(EpisodeError, match=r"(?s)dry run of the environment .*AttributeError.*Traceback.*scene.py"):
        process.dry_run(prompts("missing")[0], said)


def test_an_environment_that_cannot_be_loaded_says_so(folder):
    process = begin(folder, name="scene.py:Nobody")
    with pytest.raises(ConfigError, match="has no 'Nobody'"):
        play(process, "two_turns")
    process.close()
