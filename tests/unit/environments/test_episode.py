# SPDX-License-Identifier: Apache-2.0
"""Test one episode: whatever an environment does, there is a checked trajectory or a named error."""

import asyncio
import contextlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.environments import Chat
from megarl.environments.episode import Player
from megarl.errors import EpisodeError, RewardError, WorkerError
from megarl.tasks.base import NOTHING, Reward
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.types import Prompt, Trajectory
from tests.helpers.scripted import Policy

PROMPT = Prompt("p-1", ({"role": "user", "content": "q"},))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


class Scene:
    """An environment whose rollout is a function."""

    def __init__(self, rollout, unfinished=None):
        self.rollout = rollout
        if unfinished is not None:
            self.unfinished_metrics = unfinished


def play(folder, rollout, *, weights=None, zero=False, client=None, unfinished=None, **limits):
    client = client or Policy(folder, ["ab"]).client(**limits)
    player = Player(Scene(rollout, unfinished), "scene", Verdicts("environment 'scene'", weights or {}), zero)
    return asyncio.run(player.play(PROMPT, client))


async def one_turn(prompt, client):
    await Chat(client).sample()
    return client.trajectory(Reward(0.5, {"correct": 1.0}, "ab"))


async def endless(prompt, client):
    chat = Chat(client)
    while True:
        await chat.sample()
        chat.add({"role": "user", "content": "x"})


async def raises(prompt, client):
    raise KeyError("board")


async def sleeps(prompt, client):
    await Chat(client).sample()
    await asyncio.sleep(100)


def returns(change):
    async def rollout(prompt, client):
        await Chat(client).sample()
        return change(client.trajectory(1.0))

    return rollout


def test_the_reward_is_the_environments_own(folder):
    played = play(folder, one_turn)
    assert (played.reward.score, played.reward.answer, played.texts) == (0.5, "ab", ["ab<|end|>"])
    assert played.reward.metrics == {"correct": 1.0} and played.trajectory.turns == 1


@pytest.mark.parametrize(
    ("rollout", "limits", "reason"),
    [(endless, {"turns": 3}, "turns"), (endless, {"tokens": 20}, "length"), (sleeps, {"seconds": 0.05}, "time")],
)
def test_a_limit_that_is_not_caught_ends_the_episode_with_what_was_drawn(folder, rollout, limits, reason):
    played = play(folder, rollout, **limits)
    assert (played.reward.score, played.trajectory.finish_reason) == (0.0, reason)
    assert played.reward == NOTHING
    assert played.trajectory.drawn_tokens > 0


@pytest.mark.parametrize(("rollout", "limits"), [(endless, {"turns": 3}), (raises, {"zero": True})])
def test_an_episode_without_a_reward_has_the_metrics_that_the_environment_names(folder, rollout, limits):
    played = play(folder, rollout, unfinished={"correct": 0.0}, **limits)
    assert played.reward == replace(NOTHING, metrics={"correct": 0.0})


def test_components_are_weighed(folder):
    rollout = returns(lambda one: replace(one, reward={"right": True, "short": 0.5}))
    played = play(folder, rollout, weights={"right": 1.0, "short": 0.2})
    assert played.reward.score == pytest.approx(1.1) and played.reward.metrics["short"] == 0.5
    with pytest.raises(RewardError, match="component 'right', which has no weight"):
        play(folder, rollout)


async def leaves(prompt, client):
    sys.exit(3)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (raises, "environment 'scene', prompt 'p-1': its rollout raised KeyError: 'board'"),
        (leaves, "its rollout raised SystemExit: 3"),
        (returns(lambda one: 1.0), r"its rollout returned 1.0 \(float\); return client.trajectory"),
        (returns(lambda one: replace(one, sequences=(None,))), "sequence 0 of its trajectory: it is None"),
        (returns(lambda one: replace(one, finish_reason="won")), "finish_reason is 'won'; it must be stop, length"),
        (returns(lambda one: replace(one, rewards=(1.0, 2.0))), "rewards has 2 entries; give one for each of its 1"),
        (returns(lambda one: replace(one, rewards=(np.nan,))), "they must be finite"),
        (returns(lambda one: replace(one, advantages=(np.zeros(2),))), "one finite number for each of its 3 drawn"),
        (returns(lambda one: replace(one, reward="much")), "returned 'much' .* as the score"),
        (returns(lambda one: replace(one, reward=np.inf)), "must be finite"),
    ],
)
def test_what_is_wrong_is_a_named_error_or_a_counted_zero(folder, rollout, message):
    with pytest.raises((EpisodeError, RewardError), match=message):
        play(folder, rollout)
    played = play(folder, rollout, zero=True)
    assert played.reward == NOTHING and played.trajectory.finish_reason == "error"


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, logprobs=one.logprobs * np.nan),
        lambda one: replace(one, versions=one.versions.astype(float)),
        lambda one: replace(one, prompt_ids=one.prompt_ids[:0]),
        lambda one: replace(one, response_ids=one.response_ids[None]),
        lambda one: replace(one, logprobs=one.logprobs[1:]),
        lambda one: replace(one, drawn=np.ones(1, dtype=bool)),
    ],
)
def test_sequences_of_wrong_shapes_are_refused(folder, change):
    rollout = returns(lambda one: replace(one, sequences=(change(one.sequences[0]),)))
    with pytest.raises((EpisodeError,), match="environment 'scene', prompt 'p-1'"):
        play(folder, rollout)


def test_a_failure_of_the_engines_is_no_episode_whatever_the_environment_makes_of_it(folder):
    async def die(ids, turn, most):
        raise WorkerError("sampler 0 died")

    async def swallow(prompt, client):
        with contextlib.suppress(Exception):
            await client.sample([1])
        return Trajectory((), reward=1.0)

    for rollout in (one_turn, swallow):
        client = Policy(folder, ["a"]).client()
        client.draw = die
        with pytest.raises(WorkerError, match="sampler 0 died"):
            play(folder, rollout, zero=True, client=client)
