# SPDX-License-Identifier: Apache-2.0
"""Test the OpenAI-compatible endpoint with OpenAI's own client: what passes through is recorded exactly."""

import asyncio

import numpy as np
import pytest

from megarl.environments import endpoint
from megarl.environments.episode import Player
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.types import Prompt
from tests.helpers.scripted import Policy
from tests.helpers.tokenizer import make_tokenizer

openai = pytest.importorskip("openai")  # vLLM brings it
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def run(client, harness, key=None):
    async def play():
        async with endpoint(client) as address:
            async with openai.AsyncOpenAI(
                base_url=address.base_url, api_key=key or address.api_key, max_retries=0
            ) as remote:
                return await harness(remote)

    return asyncio.run(play())


def ask(remote, *messages, **settings):
    return remote.chat.completions.create(model="any", messages=list(messages), **settings)


def test_a_conversation_is_one_sequence_of_exactly_the_drawn_tokens(folder):
    policy = Policy(folder, ["ab", "c"])
    client = policy.client()
    more = {"role": "user", "content": "more"}

    async def harness(remote):
        first = await ask(remote, USER, temperature=1.0)
        reply = first.choices[0].message.model_dump()
        second = await ask(remote, USER, reply, more, max_tokens=50)
        return first, second, reply

    first, second, _ = run(client, harness)
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("ab", "c")
    assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens == 3
    [sequence] = client.sequences()
    messages = [USER, {"role": "assistant", "content": "ab"}, more, {"role": "assistant", "content": "c"}]
    whole = policy.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist() == whole
    assert sequence.drawn.sum() == 5 and sequence.versions.tolist() == [0, 0, 0, 1, 1]
    assert sequence.logprobs.tolist() == [-1, -2, -3, -1, -2]


def test_a_fork_and_a_changed_history_begin_sequences(folder):
    client = Policy(folder, ["ab", "c", "d", "e"]).client()

    async def harness(remote):
        await ask(remote, USER)
        reply = {"role": "assistant", "content": "ab"}
        await ask(remote, USER, reply, {"role": "user", "content": "x"})
        await ask(remote, USER, reply, {"role": "user", "content": "y"})
        await ask(remote, USER, {"role": "assistant", "content": "other"}, {"role": "user", "content": "z"})

    run(client, harness)
    found = client.sequences()
    assert [int(one.drawn.sum()) for one in found] == [5, 2, 2]
    assert client.decode(found[2].prompt_ids) == "hiotherz"


def test_text_and_ids_are_completed(folder):
    client = Policy(folder, ["ab"]).client()

    async def harness(remote):
        text = await remote.completions.create(model="any", prompt="hi")
        ids = await remote.completions.create(model="any", prompt=[5, 6], max_tokens=1)
        return text, ids

    text, ids = run(client, harness)
    assert text.choices[0].text == "ab" and ids.choices[0].finish_reason == "length"
    assert [one.prompt_ids.tolist() for one in client.sequences()] == [client.encode("hi").tolist(), [5, 6]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stream": True}, "'stream' is True, which is not supported"),
        ({"n": 2}, "'n' is 2"),
        ({"stop": ["x"]}, "'stop' is"),
        ({"max_tokens": 0}, "must be an integer of at least 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools' is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, settings, message):
    client = Policy(folder, ["ab"]).client()
    with pytest.raises(openai.BadRequestError, match=message):
        run(client, lambda remote: ask(remote, USER, **settings))
    assert not client.sequences()


def test_without_the_token_nothing_is_answered(folder):
    client = Policy(folder, ["ab"]).client()
    with pytest.raises(openai.AuthenticationError, match="wrong or missing token"):
        run(client, lambda remote: ask(remote, USER), key="guess")
    assert not client.sequences()


def test_a_limit_that_a_harness_runs_into_is_no_error_of_it(folder):
    class Harness:
        async def rollout(self, prompt, client):
            async with endpoint(client) as address:
                async with openai.AsyncOpenAI(
                    base_url=address.base_url, api_key=address.api_key, max_retries=0
                ) as remote:
                    while True:
                        await ask(remote, USER)

    player = Player(Harness(), "harness", Verdicts("environment", {}))
    played = asyncio.run(player.play(Prompt("p", (USER,)), Policy(folder, ["ab"]).client(turns=2)))
    assert played.trajectory.finish_reason == "turns" and len(played.trajectory.sequences) == 2
