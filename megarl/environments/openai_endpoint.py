# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint in front of episodes, for harnesses that only know a base URL.

``/v1/chat/completions`` and ``/v1/completions``, on loopback, with a token. What passes through is recorded by the
episode's client, token by token. Sampling is that of the run; what would change the answer otherwise is refused by
name. ``megarl.environments.openai_request`` lists what is supported.
"""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.environments.chat import Chat
from megarl.environments.client import Client, Turn
from megarl.environments.openai_answer import Answer
from megarl.environments.openai_request import Refused, Request, parse_messages, parse_request
from megarl.environments.openai_server import Address, Reply, Server
from megarl.environments.tool_calls import Call, CallFormat, call_format, marked_text

Messages = list[dict[str, Any]]


@contextlib.asynccontextmanager
async def endpoint(client: Client) -> AsyncIterator[Address]:
    """Serve the policy of an episode during the block.

    A limit of the episode is answered by status 400, of type ``episode_limit``; what the harness then raises counts as
    that limit, not as an error.

    Args:
        client: of the episode.

    Yields:
        Where the harness finds it.
    """
    server = Server(Session(client).respond)
    try:
        yield await server.start()
    finally:
        server.close()


class Gateway:
    """Serves the policy of many episodes at one address; a request says by its ``model`` of which episode it is."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._server = Server(self._respond)

    async def start(self) -> Address:
        """Begin to serve."""
        return await self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    @contextlib.contextmanager
    def session(self, client: Client) -> Iterator[str]:
        """Serve an episode during the block.

        Yields:
            The model's name in its requests.
        """
        name = f"policy-{next(self._numbers)}"
        self._sessions[name] = Session(client)
        try:
            yield name
        finally:
            del self._sessions[name]

    async def _respond(self, path: str, body: dict[str, Any]) -> Reply:
        session = self._sessions.get(str(body.get("model")))
        if session is None:
            raise Refused(f"'model' is {body.get('model')!r}, which names no episode that is played", 404)
        return await session.respond(path, body)


class Session:
    """The requests of one episode."""

    def __init__(self, client: Client) -> None:
        self._client, self._numbers = client, itertools.count()
        self._forms: dict[str, CallFormat] = {}  # of each list of tools
        # Conversations up to each turn, with their tools: what extends one goes on with its tokens.
        self._known: list[tuple[Sequence[Mapping[str, Any]], Messages, Chat]] = []

    async def respond(self, path: str, body: dict[str, Any]) -> Reply:
        """Answer a request.

        Raises:
            Refused: it asks for what is not served.
            EpisodeLimit, MegarlError: see ``Client.sample``.
        """
        answers = {"/v1/chat/completions": ("messages", self._chat), "/v1/completions": ("prompt", self._completion)}
        if path not in answers:
            raise Refused(f"{path} is not served; {' and '.join(answers)} are", 404)
        field, answer = answers[path]
        request = parse_request(body, field)
        return Reply(await answer(request), request.stream, request.usage)

    async def _chat(self, request: Request) -> Answer:
        said, tools = parse_messages(request.asked), request.tools
        form = self._form(tools) if tools else None
        chat = self._conversation(said, tools)
        turn = await chat.sample(request.most, request.stop)
        text, calls = self._read(turn, form) if form is not None and request.calls else (turn.text, [])
        reason = "tool_calls" if calls else turn.finish_reason
        answer = Answer(True, text, reason, len(chat.ids) - len(turn.ids), len(turn.ids), calls)
        self._known.append((tools, [*said, *parse_messages([answer.message()])], chat))
        return answer

    def _form(self, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
        key = json.dumps(tools)
        if key not in self._forms:
            self._forms[key] = call_format(self._client.tokenizer, self._client.template, tools)
        return self._forms[key]

    def _conversation(self, said: Messages, tools: Sequence[Mapping[str, Any]]) -> Chat:
        """Return the longest known conversation that the messages extend, or a new one."""
        begun = [
            (before, chat)
            for known, before, chat in self._known
            if known == tools and len(before) < len(said) and said[: len(before)] == before
        ]
        if not begun:
            return Chat(self._client, self._rendered(said, tools), tools)
        before, chat = max(begun, key=lambda each: len(each[0]))
        chat = chat.copy()
        chat.add(*said[len(before) :])
        return chat

    def _read(self, turn: Turn, form: CallFormat) -> tuple[str, list[Call]]:
        """Return what a turn says beside calls, and the calls, each with an id."""
        text, calls = form.read(marked_text(turn.ids, self._client.tokenizer, form))
        # Ids are counted, not drawn at random: a template may show them to the policy.
        named = [call if call.id else call._replace(id=f"call{next(self._numbers):05d}") for call in calls]
        return (text, named) if calls else (turn.text, [])

    def _rendered(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        client = self._client
        template = {**client.template, **({"tools": list(tools)} if tools else {})}
        try:
            ids = client.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template
            )
        except Exception as error:  # a template may raise anything
            raise Refused(f"the chat template refuses the messages: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    async def _completion(self, request: Request) -> Answer:
        ids = self._client.encode(request.asked) if isinstance(request.asked, str) else request.asked
        turn = await self._client.sample(ids, request.most, request.stop)
        return Answer(False, turn.text, turn.finish_reason, len(ids), len(turn.ids))
