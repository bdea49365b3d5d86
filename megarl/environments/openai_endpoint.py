# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint in front of one episode, for harnesses that only know a base URL.

``/v1/chat/completions`` and ``/v1/completions``, on loopback, with a token. What passes through is recorded by the
episode's client, token by token. Sampling is that of the run: ``model``, ``temperature``, ``top_p``, ``seed`` and
``user`` of a request are ignored; what would change the answer otherwise is refused by name.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.environments.chat import Chat
from megarl.environments.client import Client, EpisodeLimit, Turn
from megarl.errors import MegarlError
from megarl.network import LOOPBACK

LARGEST_BODY = 64 * 2**20
IGNORED = {"model", "temperature", "top_p", "seed", "user", "metadata", "store"}
# Fields that have only one value here, beside being absent or null.
FIXED = {"n": 1, "stream": False, "logprobs": False, "echo": False, "frequency_penalty": 0, "presence_penalty": 0}
LENGTHS = ("max_tokens", "max_completion_tokens")


class Address(NamedTuple):
    """The place of the policy for a harness: ``base_url`` ends in ``/v1``; ``api_key`` is this episode's token."""

    base_url: str
    api_key: str


class Refused(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type`` of the error.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


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
    session = _Session(client, secrets.token_hex(16))
    server = await asyncio.start_server(session.serve, LOOPBACK, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield Address(f"http://{LOOPBACK}:{port}/v1", session.token)
    finally:
        server.close()
        for writer in list(session.open):
            writer.close()


class _Session:
    """The endpoint of one episode."""

    def __init__(self, client: Client, token: str) -> None:
        self._client, self.token = client, token
        self.open: set[asyncio.StreamWriter] = set()
        self._known: list[tuple[list[dict[str, Any]], Chat]] = []  # conversations, up to each turn

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        self.open.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                status, answer = await self._respond(reader)
                body = json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
        finally:
            self.open.discard(writer)
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
        try:
            return 200, await self._answer(*await self._read(reader))
        except Refused as error:
            return error.status, _error(error.kind, str(error))
        except EpisodeLimit as error:
            return 400, _error("episode_limit", str(error))
        except MegarlError as error:
            return 400, _error("invalid_request_error", str(error))

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request, after checking its token."""
        try:
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, "invalid_request_error", "the headers are too long") from None
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self.token.encode()):
            raise Refused(401, "authentication_error", "wrong or missing token")
        method, path, *_ = [*request.split(" "), "", ""]
        length = headers.get("content-length", "")
        if method != "POST" or not length.isdecimal() or int(length) > LARGEST_BODY:
            raise Refused(400, "invalid_request_error", f"send a POST with a body of at most {LARGEST_BODY} bytes")
        try:
            body = json.loads(await reader.readexactly(int(length)))
        except (ValueError, RecursionError):
            raise Refused(400, "invalid_request_error", "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "invalid_request_error", "the body is not a JSON object")
        return path.partition("?")[0], body

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answers = {"/v1/chat/completions": ("messages", self._chat), "/v1/completions": ("prompt", self._completion)}
        if path not in answers:
            raise Refused(404, "invalid_request_error", f"{path} is not served; {' and '.join(answers)} are")
        field, answer = answers[path]
        for name, value in body.items():
            if name in (field, *LENGTHS) or name in IGNORED or value is None or value == FIXED.get(name, ...):
                continue
            raise Refused(400, "invalid_request_error", f"'{name}' is {value!r}, which is not supported; remove it")
        if field not in body:
            raise Refused(400, "invalid_request_error", f"'{field}' is missing")
        most = next((body[name] for name in LENGTHS if body.get(name) is not None), None)
        if most is not None and (type(most) is not int or most < 1):
            raise Refused(
                400, "invalid_request_error", f"'max_tokens' is {most!r}; it must be an integer of at least 1"
            )
        return await answer(body[field], most)

    async def _chat(self, messages: Any, most: int | None) -> dict[str, Any]:
        said = _messages(messages)
        begun = [each for each in self._known if len(each[0]) < len(said) and said[: len(each[0])] == each[0]]
        if begun:
            before, chat = max(begun, key=lambda each: len(each[0]))
            chat = chat.copy()
            chat.add(*said[len(before) :])
        else:
            chat = Chat(self._client, self._rendered(said))
        turn = await chat.sample(most)
        reply = {"role": "assistant", "content": turn.text}
        self._known.append(([*said, reply], chat))
        return _response("chat.completion", turn, len(chat.ids) - len(turn.ids), {"message": reply})

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        client = self._client
        try:
            ids = client.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **client.template
            )
        except Exception as error:  # a template may raise anything
            raise Refused(400, "invalid_request_error", f"the chat template refuses the messages: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    async def _completion(self, prompt: Any, most: int | None) -> dict[str, Any]:
        ids = self._client.encode(prompt) if isinstance(prompt, str) else prompt
        turn = await self._client.sample(ids, most)
        return _response("text_completion", turn, len(ids), {"text": turn.text})


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages without what is null, so that a reply that comes back equals what was sent."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused(400, "invalid_request_error", "'messages' must be a list of objects")
    said = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in said:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise Refused(400, "invalid_request_error", f"message {message} needs role and content, as strings")
    return said


def _response(kind: str, turn: Turn, sent: int, choice: dict[str, Any]) -> dict[str, Any]:
    drawn = len(turn.ids)
    return {
        "id": f"megarl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, **choice, "finish_reason": turn.finish_reason, "logprobs": None}],
        "usage": {"prompt_tokens": sent, "completion_tokens": drawn, "total_tokens": sent + drawn},
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}
