# SPDX-License-Identifier: Apache-2.0
"""Test that the record of an episode is exactly what was sent and drawn, and that its limits hold."""

import asyncio

import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.environments import Chat, EpisodeLimit
from megarl.environments.record import Call, sequences_of
from megarl.errors import ConfigError, EpisodeError
from megarl.types import Completion
from tests.helpers.scripted import END, Policy

# As Qwen3's: reasoning of earlier turns is dropped.
REWRITES = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'].split('</think>')[-1] }}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def drawn(sent, ids, version=0):
    ids = np.array(ids)
    return Call(
        np.array(sent), Completion(np.array(sent), ids, -ids.astype(np.float32), np.full(len(ids), version), "stop")
    )


def test_a_conversation_appends_what_the_template_appends_and_masks_what_others_said(folder):
    policy = Policy(folder, ["ab", "c"])
    client = policy.client()

    async def play():
        chat = Chat(client)
        assert (await chat.sample()).text == "ab"
        chat.add({"role": "user", "content": "no"})
        await chat.sample()
        return chat

    chat = asyncio.run(play())
    [sequence] = client.sequences()
    messages = [("user", "q"), ("assistant", "ab"), ("user", "no"), ("assistant", "c")]
    whole = policy.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=True, return_dict=False
    )
    assert np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist() == whole == chat.ids.tolist()
    # Drawn are "ab<|end|>" and "c<|end|>"; in between lies "<|user|>no<|end|><|assistant|>".
    assert sequence.drawn.tolist() == [True] * 3 + [False] * 5 + [True] * 2
    assert sequence.logprobs.tolist() == [-1, -2, -3, -1, -2]
    assert sequence.versions.tolist() == [0, 0, 0, 1, 1]
    assert policy.seen[1][0].tolist() == whole[: -len("c") - 1]


def test_a_turn_that_was_cut_is_ended_by_the_template_and_that_token_is_masked(folder):
    client = Policy(folder, ["abcdef", "g"]).client()

    async def play():
        chat = Chat(client)
        assert (await chat.sample(max_tokens=2)).finish_reason == "length"
        chat.add({"role": "user", "content": "x"})
        await chat.sample()

    asyncio.run(play())
    [sequence] = client.sequences()
    assert sequence.drawn.tolist() == [True] * 2 + [False] * 5 + [True] * 2
    assert sequence.response_ids[2] == END


def test_a_template_that_rewrites_history_is_refused_by_name(folder):
    policy = Policy(folder, ["a", "b"])
    client = policy.client(template={"chat_template": REWRITES})

    async def play():
        chat = Chat(client)
        await chat.sample()
        chat.add({"role": "user", "content": "x"})
        await chat.sample()

    with pytest.raises(ConfigError, match=r"chat template of '.*' rewrites earlier turns when a message \(user\)"):
        asyncio.run(play())


def test_messages_at_the_wrong_time_are_refused(folder):
    async def play(steps):
        chat = Chat(Policy(folder, ["a"]).client())
        for step in steps:
            if step == "add":
                chat.add({"role": "user", "content": "x"})
            else:
                await chat.sample()

    with pytest.raises(EpisodeError, match="the prompt asks for a turn"):
        asyncio.run(play(["add", "sample"]))
    with pytest.raises(EpisodeError, match="add a message"):
        asyncio.run(play(["sample", "sample"]))


@pytest.mark.parametrize(("limits", "reason"), [({"turns": 2}, "turns"), ({"tokens": 12}, "length")])
def test_limits_end_an_episode_with_a_reason(folder, limits, reason):
    client = Policy(folder, ["abc"]).client(**limits)

    async def play():
        chat = Chat(client)
        while True:
            await chat.sample()
            chat.add({"role": "user", "content": "x"})

    with pytest.raises(EpisodeLimit):
        asyncio.run(play())
    trajectory = client.trajectory(0.5)
    assert (trajectory.finish_reason, trajectory.is_truncated, trajectory.reward) == (reason, True, 0.5)
    [sequence] = trajectory.sequences
    assert len(sequence.response_ids) <= limits.get("tokens", 200)
    assert sequence.drawn[-1] and len(sequence.logprobs) == sequence.drawn.sum()


def test_turn_tokens_and_what_is_left_bound_a_turn(folder):
    policy = Policy(folder, ["abc"])
    client = policy.client(turn_tokens=3, tokens=5)
    begin = client.prompt_ids

    async def play():
        turn = await client.sample(begin)
        await client.sample(np.concatenate([begin, turn.ids]), max_tokens=9)

    asyncio.run(play())
    assert [most for _, _, most in policy.seen] == [3, 2]
    assert client.trajectory().finish_reason == "length"


@pytest.mark.parametrize("ids", [[], [[1, 2]], ["a"], [0.5]])
def test_what_is_no_token_ids_is_refused(folder, ids):
    with pytest.raises(EpisodeError, match=r"give the token ids as integers \[P\]"):
        asyncio.run(Policy(folder, ["a"]).client().sample(ids))


def test_calls_become_branches_and_no_drawn_token_is_trained_on_twice():
    calls = [
        drawn([1, 2], [10, 11]),
        drawn([1, 2, 10, 11, 5], [12]),  # goes on
        drawn([1, 2, 10, 11, 6], [13], 1),  # a second answer to the first turn
        drawn([1, 2], [14]),  # a second first turn
        drawn([1, 2, 10, 11, 6, 13], [15], 2),
        Call(np.array([9])),  # never answered
    ]
    found = sequences_of(calls)
    assert [(one.prompt_ids.tolist(), one.response_ids.tolist(), one.drawn.tolist()) for one in found] == [
        ([1, 2], [10, 11, 5, 12], [True, True, False, True]),
        ([1, 2, 10, 11, 6], [13, 15], [True, True]),
        ([1, 2], [14], [True]),
    ]
    assert found[1].versions.tolist() == [1, 2]
    assert sum(len(one.logprobs) for one in found) == sum(len(call.drawn.logprobs) for call in calls if call.drawn)


def test_overlapping_calls_are_recorded_in_the_order_of_their_requests(folder):
    client = Policy(folder, ["a", "b", "c"]).client()

    async def play():
        inner = client.draw

        async def slow_first(ids, turn, most):
            await asyncio.sleep(0.02 if turn == 0 else 0)
            return await inner(ids, turn, most)

        client.draw = slow_first
        await asyncio.gather(*(client.sample(client.prompt_ids) for _ in range(3)))

    asyncio.run(play())
    assert [client.decode(one.response_ids) for one in client.sequences()] == ["a", "b", "c"]
