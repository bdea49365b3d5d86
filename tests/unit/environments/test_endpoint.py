# SPDX-License-Identifier: Apache-2.0
"""Test the OpenAI-compatible endpoint with OpenAI's own client: what passes through is recorded exactly."""

import asyncio
import json

import httpx
import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.environments import endpoint
from megarl.environments.episode import Player
from megarl.environments.openai_endpoint import Gateway
from megarl.tasks.rewards.verdicts import Verdicts
from megarl.types import Prompt
from tests.helpers.scripted import Policy
from tests.helpers.tokenizer import CALLING

openai = pytest.importorskip("openai")  # vLLM brings it
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


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


async def collected(stream):
    return [chunk async for chunk in stream]


def test_a_stream_says_what_an_answer_says_in_one_piece(folder):
    client = Policy(folder, ["ab", "c"]).client()

    async def harness(remote):
        usage = {"include_usage": True}
        chunks = await collected(await ask(remote, USER, stream=True, stream_options=usage))
        text = await collected(await remote.completions.create(model="any", prompt="hi", stream=True))
        return chunks, text

    chunks, text = run(client, harness)
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant" and "".join(each.delta.content or "" for each in deltas) == "ab"
    assert [each.finish_reason for each in deltas] == [None, None, "stop"]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 3
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"
    assert [each.choices[0].text for each in text] == ["c", ""] and text[-1].choices[0].finish_reason == "stop"
    assert sum(len(one.logprobs) for one in client.sequences()) == 5


def test_a_stream_ends_with_done_and_an_error_has_its_status(folder):
    client = Policy(folder, ["ab"]).client(turns=1)

    async def play():
        async with endpoint(client) as address, httpx.AsyncClient() as web:
            head = {"Authorization": f"Bearer {address.api_key}"}
            body = {"model": "any", "messages": [USER], "stream": True}
            url = f"{address.base_url}/chat/completions"
            return [await web.post(url, json=body, headers=head) for _ in range(2)]

    first, second = asyncio.run(play())
    assert first.headers["content-type"] == "text/event-stream"
    lines = first.text.removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]" and all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
    assert second.status_code == 400 and second.json()["error"]["type"] == "episode_limit"


def test_a_stop_string_ends_what_is_seen_and_what_is_recorded(folder):
    policy = Policy(folder, ["ab--cd--", "e"])
    client = policy.client()

    async def harness(remote):
        first = await ask(remote, USER, stop=["no", "--"])
        reply = first.choices[0].message.model_dump()
        await ask(remote, USER, reply, {"role": "user", "content": "x"}, stop="--")
        return first

    first = run(client, harness)
    assert first.choices[0].message.content == "ab" and first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == 4
    [sequence] = client.sequences()
    # Recorded up to the token that completes the stop string, with the logprobs that they were drawn with.
    assert client.decode(sequence.response_ids, special=True) == "ab--<|end|><|user|>x<|end|><|assistant|>e<|end|>"
    assert sequence.logprobs.tolist() == [-1, -2, -3, -4, -1, -2] and sequence.versions.tolist() == [0] * 4 + [1] * 2
    spoken = client.decode(sequence.response_ids[sequence.drawn], special=True)
    assert spoken == "ab--e<|end|>"


def test_a_tools_answer_is_appended_to_the_drawn_call(folder):
    said = 'I add.<call>{"arguments":{"a":1},"name":"add"}</call><call>{"name": "add", "arguments": {}}</call>'
    policy = Policy(folder, [said, "ok"])
    client = policy.client(template={"chat_template": CALLING}, tokens=1000, turn_tokens=1000)

    async def harness(remote):
        first = await ask(remote, USER, tools=[TOOL], tool_choice="auto")
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": str(i)} for i, call in enumerate(message.tool_calls)
        ]
        second = await ask(remote, USER, message.model_dump(), *results, tools=[TOOL])
        return first.choices[0], second.choices[0]

    first, second = run(client, harness)
    assert first.finish_reason == "tool_calls" and first.message.content == "I add."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in first.message.tool_calls] == [
        ("add", {"a": 1}),
        ("add", {}),
    ]
    assert len({call.id for call in first.message.tool_calls}) == 2
    assert second.finish_reason == "stop" and second.message.content == "ok"
    [sequence] = client.sequences()
    # The first call was not written as the template writes one; it stays as it was drawn.
    assert client.decode(sequence.response_ids, special=True) == (
        f"{said}<|end|><|tool|>0<|end|><|tool|>1<|end|><|assistant|>ok<|end|>"
    )
    assert json.dumps(TOOL["function"]["name"]) in client.decode(sequence.prompt_ids)


def test_calls_are_streamed_and_other_tools_begin_another_sequence(folder):
    client = Policy(folder, ['<call>{"name": "add", "arguments": {"a": "é"}}</call>']).client(
        template={"chat_template": CALLING}, tokens=1000, turn_tokens=1000
    )

    async def harness(remote):
        chunks = await collected(await ask(remote, USER, tools=[TOOL], stream=True))
        plain = await ask(remote, USER, tools=[TOOL], tool_choice="none")
        reply = plain.choices[0].message.model_dump()
        await ask(remote, USER, reply, {"role": "user", "content": "more"})
        return chunks, plain

    chunks, plain = run(client, harness)
    [call] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "add") and chunks[-1].choices[0].finish_reason == "tool_calls"
    assert plain.choices[0].message.content.startswith("<call>") and not plain.choices[0].message.tool_calls
    assert len(client.sequences()) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 2}, "'n' is 2, which is not supported; only 1 is"),
        ({"logit_bias": {"5": 1}}, "'logit_bias' is .* supported are messages, max_tokens, .*, stream, .*tools"),
        ({"stop": [""]}, "'stop' is"),
        ({"max_tokens": 0}, "must be an integer of at least 1"),
        ({"tools": [{"type": "function"}]}, "'tools' holds"),
        ({"tools": [TOOL]}, "the chat template of .* does not show tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "'tool_choice' is 'required'; supported are auto and none"),
        ({"extra_body": {"top_k": 5}}, "'top_k' is 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, settings, message):
    client = Policy(folder, ["ab"]).client()
    with pytest.raises(openai.BadRequestError, match=message):
        run(client, lambda remote: ask(remote, USER, **settings))
    assert not client.sequences()


def test_one_address_serves_many_episodes_by_the_models_name(folder):
    clients = [Policy(folder, [text]).client() for text in ("ab", "cd")]

    async def play():
        gateway = Gateway()
        address = await gateway.start()
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as remote:
            with gateway.session(clients[0]) as first, gateway.session(clients[1]) as second:
                names = (second, first)
                answers = [await remote.chat.completions.create(model=name, messages=[USER]) for name in names]
            with pytest.raises(openai.NotFoundError, match="names no episode that is played"):
                await remote.chat.completions.create(model=first, messages=[USER])
        gateway.close()
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(play()) == ["cd", "ab"]
    assert [client.decode(client.sequences()[0].response_ids) for client in clients] == ["ab", "cd"]


def test_without_the_token_nothing_is_answered(folder):
    client = Policy(folder, ["ab"]).client()
    with pytest.raises(openai.AuthenticationError, match="wrong or missing token"):
        run(client, lambda remote: ask(remote, USER), key="guess")
    assert not client.sequences()


def test_what_a_harness_no_longer_waits_for_is_neither_recorded_nor_a_turn(folder):
    """As when a client's time is up, and it asks again."""
    policy, slow = Policy(folder, ["ab", "cd"]), asyncio.Event()
    draw = policy.draw

    async def draw_slowly(ids, turn, most):
        if turn == 0:
            await slow.wait()
        return await draw(ids, turn, most)

    policy.draw = draw_slowly
    client = policy.client(turns=1)

    async def harness(remote):
        with pytest.raises(openai.APITimeoutError):
            await ask(remote.with_options(timeout=0.3), USER)
        while client.turns:
            await asyncio.sleep(0.01)
        answer = await ask(remote, USER)
        slow.set()
        await asyncio.sleep(0.1)
        return answer.choices[0].message.content

    assert run(client, harness) == "cd"
    [sequence] = client.sequences()
    assert client.decode(sequence.response_ids) == "cd" and client.turns == 1


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
