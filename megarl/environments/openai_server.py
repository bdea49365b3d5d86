# SPDX-License-Identifier: Apache-2.0
"""Serve HTTP on loopback for those who know a token; what is answered, others decide."""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from megarl.environments.client import EpisodeLimit
from megarl.environments.openai_answer import Answer, error_body
from megarl.environments.openai_request import Refused
from megarl.errors import MegarlError
from megarl.network import LOOPBACK

LARGEST_BODY = 64 * 2**20


class Address(NamedTuple):
    """The place of the policy for a harness: ``base_url`` ends in ``/v1``; ``api_key`` is the token."""

    base_url: str
    api_key: str


class Reply(NamedTuple):
    """An answer, and how it is sent.

    Attributes:
        answer: what the policy said.
        stream: True for events.
        usage: True for an event with the number of tokens, too.
    """

    answer: Answer
    stream: bool = False
    usage: bool = False


class Server:
    """Reads requests, and sends what ``respond`` makes of them.

    A connection takes one request. Nothing is sent before the answer is known, so that an error has its status, also
    where events were asked for.
    """

    def __init__(self, respond: Callable[[str, dict[str, Any]], Awaitable[Reply]]) -> None:
        """
        Args:
            respond: function: path, body -> reply. It may raise ``Refused``, ``EpisodeLimit`` or ``MegarlError``.
        """
        self._respond, self._token = respond, secrets.token_hex(16)
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> Address:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        port = self._server.sockets[0].getsockname()[1]
        return Address(f"http://{LOOPBACK}:{port}/v1", self._token)

    def close(self) -> None:
        """Stop listening, and close what is open."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        self._open.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                writer.write(await self._answered(reader))
                await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader) -> bytes:
        try:
            path, body = await self._read(reader)
            reply = await _while_open(reader, self._respond(path, body))
        except Refused as error:
            return _json(error.status, error_body(error.kind, str(error)))
        except EpisodeLimit as error:
            return _json(400, error_body("episode_limit", str(error)))
        except MegarlError as error:
            return _json(400, error_body("invalid_request_error", str(error)))
        if reply.stream:
            return _http(200, "text/event-stream", "".join(reply.answer.events(reply.usage)).encode())
        return _json(200, reply.answer.whole())

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request, after checking its token."""
        try:
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise Refused("the headers are too long", 431) from None
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._token.encode()):
            raise Refused("wrong or missing token", 401, "authentication_error")
        method, path, *_ = [*request.split(" "), "", ""]
        length = headers.get("content-length", "")
        if method != "POST" or not length.isdecimal() or int(length) > LARGEST_BODY:
            raise Refused(f"send a POST with a body of at most {LARGEST_BODY} bytes")
        try:
            body = json.loads(await reader.readexactly(int(length)))
        except (ValueError, RecursionError):
            raise Refused("the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused("the body is not a JSON object")
        return path.partition("?")[0], body


async def _while_open(reader: asyncio.StreamReader, answer: Awaitable[Reply]) -> Reply:
    """Wait for an answer. Give it up if whoever asked is gone: what nobody received must not be trained on.

    Raises:
        ConnectionAbortedError: the connection was closed; a harness may ask again.
    """
    drawing, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_closed(reader))
    try:
        await asyncio.wait({drawing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if drawing.done():
            return drawing.result()
        raise ConnectionAbortedError
    finally:
        for task in (drawing, gone):
            task.cancel()
        await asyncio.gather(drawing, gone, return_exceptions=True)


async def _closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1):
            pass


def _json(status: int, body: dict[str, Any]) -> bytes:
    return _http(status, "application/json", json.dumps(body).encode())


def _http(status: int, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} \r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
