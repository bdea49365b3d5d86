# SPDX-License-Identifier: Apache-2.0
"""Write answers in OpenAI's format: one JSON object, or the events of a stream."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.environments.tool_calls import Call

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """One turn of the policy.

    Attributes:
        chat: True for a message, False for text.
        text: what it says, beside calls of tools.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``.
        sent, drawn: number of tokens that the policy saw and drew.
        calls: calls of tools, each with its id.
    """

    chat: bool
    text: str
    finish_reason: str
    sent: int
    drawn: int
    calls: Sequence[Call] = ()
    _id: str = field(default_factory=lambda: f"megarl-{secrets.token_hex(8)}")
    _created: int = field(default_factory=lambda: int(time.time()))

    def message(self) -> dict[str, Any]:
        """Return the message of an assistant."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        return said | ({"tool_calls": [_written(call) for call in self.calls]} if self.calls else {})

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        said = {"message": self.message()} if self.chat else {"text": self.text}
        body = self._object("chat.completion" if self.chat else "text_completion", said, self.finish_reason)
        return body | {"usage": self._usage()}

    def events(self, usage: bool) -> Iterator[str]:
        """Yield the server-sent events of a stream: header, content, end, number of tokens if asked for, and DONE."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        empty: dict[str, Any] = {"usage": None} if usage else {}
        for said in self._deltas():
            yield _event(self._object(kind, said, None) | empty)
        end: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        yield _event(self._object(kind, end, self.finish_reason) | empty)
        if usage:
            yield _event(self._object(kind, None, None) | {"usage": self._usage()})
        yield DONE

    def _deltas(self) -> Iterator[dict[str, Any]]:
        if not self.chat:
            yield {"text": self.text}
            return
        yield {"delta": {"role": "assistant", "content": None if self.calls else ""}}
        if self.text:
            yield {"delta": {"content": self.text}}
        for index, call in enumerate(self.calls):
            yield {"delta": {"tool_calls": [{"index": index, **_written(call)}]}}

    def _object(self, kind: str, said: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **(said or {}), "finish_reason": finish_reason, "logprobs": None}
        head = {"id": self._id, "object": kind, "created": self._created, "model": "policy"}
        return head | {"choices": [] if said is None else [choice]}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.sent, "completion_tokens": self.drawn, "total_tokens": self.sent + self.drawn}


def _written(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def error_body(kind: str, message: str) -> dict[str, Any]:
    """Return OpenAI's object of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}
