# SPDX-License-Identifier: Apache-2.0
"""Read requests of OpenAI's API: what is asked, and what is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.environments.tool_calls import as_object

# These do not change what the run draws: sampling is that of the run.
IGNORED = {"model", "temperature", "top_p", "seed", "user", "metadata", "store"}
IGNORED |= {"service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that have only one value here, beside being absent or null.
FIXED: dict[str, Any] = {"n": 1, "best_of": 1, "logprobs": False, "echo": False, "parallel_tool_calls": True}
FIXED |= {"frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}}
LENGTHS = ("max_tokens", "max_completion_tokens")
OPTIONS = (*LENGTHS, "stop", "stream", "stream_options")
TOOLS = ("tools", "tool_choice")
CHOICES = ("auto", "none")


class Refused(Exception):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type`` of the error.
    """

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Request:
    """The question of a request, and how it is to be answered.

    Attributes:
        asked: ``messages`` or ``prompt``, as it was sent.
        most: most tokens of the answer, or None.
        stop: texts that end the answer.
        stream: True to send the answer as events.
        usage: True to send an event with the number of tokens, too.
        tools: definitions for the chat template; empty for none.
        calls: True if calls of tools are read from the answer.
    """

    asked: Any
    most: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    calls: bool = False


def parse_request(body: Mapping[str, Any], field: str) -> Request:
    """Read the body of a request.

    Args:
        body: as it was sent.
        field: ``"messages"`` or ``"prompt"``; only messages come with tools.

    Raises:
        Refused: a field is missing, wrong or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    served = (field, *OPTIONS, *(TOOLS if field == "messages" else ()))
    for name, value in given.items():
        if name not in served and name not in IGNORED and value != FIXED.get(name, ...):
            only = f"only {json.dumps(FIXED[name])} is" if name in FIXED else f"supported are {', '.join(served)}"
            raise Refused(f"'{name}' is {value!r}, which is not supported; {only}. Remove it")
    if field not in given:
        raise Refused(f"'{field}' is missing")
    most = next((given[name] for name in LENGTHS if name in given), None)
    if most is not None and (type(most) is not int or most < 1):
        raise Refused(f"'max_tokens' is {most!r}; it must be an integer of at least 1")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if type(stream) is not bool:
        raise Refused(f"'stream' is {stream!r}; it must be true or false")
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise Refused(f"'stream_options' is {options!r}; only include_usage is supported")
    tools, choice = _tools(given.get("tools", [])), given.get("tool_choice", "auto")
    if choice not in CHOICES:
        raise Refused(
            f"'tool_choice' is {choice!r}; supported are {' and '.join(CHOICES)}: a call cannot be forced, because the "
            "answer would not be drawn from the policy"
        )
    usage = bool(options.get("include_usage"))
    return Request(given[field], most, _stop(given.get("stop", [])), stream, usage, tools, choice == "auto")


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(f"'stop' is {given!r}; it must be a text, or a list of texts, none of them empty")
    return tuple(texts)


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    tools = given if isinstance(given, list) else [None]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"'tools' holds {tool!r}; each must be {{type: function, function: {{name: ..., ...}}}}")
    return tuple(tools)


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages in one form, so that a reply that comes back equals what was sent.

    Fields that are null or empty are left out, parts of text are joined, and arguments of calls are objects, as chat
    templates want them.

    Raises:
        Refused: they are no messages of text.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused("'messages' must be a list of objects")
    return [_message(message) for message in messages]


def _message(given: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None and value != []}
    calls = message.get("tool_calls")
    message["content"] = _text(message.get("content", "" if calls else None))
    if not isinstance(message.get("role"), str) or message["content"] is None:
        raise Refused(f"message {given} needs role and content, as texts")
    if calls is not None:
        message["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else [_call(calls)]
    return message


def _text(content: Any) -> str | None:
    """Return content that is text or parts of text; None for any other."""
    if isinstance(content, list) and content:
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(content) else None
    return content if isinstance(content, str) else None


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(
            f"'tool_calls' holds {call!r}; each must be {{id, type: function, function: {{name, arguments}}}}"
        )
    arguments = as_object(function.get("arguments", {}))
    said = function.get("arguments") if arguments is None else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": said}}
