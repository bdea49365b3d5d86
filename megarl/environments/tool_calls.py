# SPDX-License-Identifier: Apache-2.0
"""Read tool calls from what a policy said, in the form in which its own chat template writes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.errors import ConfigError

# A call that shows how a template writes calls; some templates want ids of nine letters and digits.
NAME, ARGUMENTS = "megarl_probe", {"megarl_key": "megarl-value"}
CALL = {"id": "megarl000", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
QUESTION, ANSWER = {"role": "user", "content": "MEGARL-QUESTION"}, "MEGARL-ANSWER"
OPENINGS = "[{"


class Call(NamedTuple):
    """A call of a tool: its name and arguments, and the id that the policy gave it, or None."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class CallFormat:
    """The form in which a policy calls tools: JSON with a name and arguments, between two marks.

    Attributes:
        begin: the mark before a call, without white space; empty: an answer is a call as a whole, or has none.
        end: the mark after it; may be empty.
        name, arguments: the keys of the JSON object.
    """

    begin: str
    end: str
    name: str
    arguments: str

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return what a turn says beside its calls, and the calls.

        What is no well-formed call stays text, as it was drawn.

        Args:
            text: of a turn, without the special tokens that are no marks.
        """
        if not self.begin:
            calls, end = self._calls(text, 0)
            return ("", calls) if calls and not text[end:].strip() else (text, [])
        found: list[Call] = []
        said, place = "", 0
        while (begin := text.find(self.begin, place)) >= 0:
            calls, end = self._calls(text, begin + len(self.begin))
            said += text[place : begin if calls else end]
            found += calls
            place = end
        return (said + text[place:]).strip() if found else text, found

    def _calls(self, text: str, start: int) -> tuple[list[Call], int]:
        """Return the calls whose JSON begins at ``start``, and where they end; none if something is wrong."""
        place = _skip_space(text, start)
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return [], start
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        end = _skip_space(text, place)
        # A turn that ends by a stop string, or by a token that the tokenizer drops, may lack the mark after the last.
        if self.end and not text.startswith(self.end, end) and text[end:].strip():
            return [], start
        right = [call for call in calls if call is not None]
        return (right, min(end + len(self.end), len(text))) if len(right) == len(calls) else ([], start)

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return None
        arguments = as_object(value.get(self.arguments, {}))
        given = value.get("id")
        return None if arguments is None else Call(value[self.name], arguments, given if type(given) is str else None)


def as_object(arguments: Any) -> dict[str, Any] | None:
    """Return arguments, a JSON object or its text, as a dictionary; None if they are neither."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def call_format(tokenizer: Any, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> CallFormat:
    """Return the form in which a chat template writes calls, found by rendering one.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        template: variables of the template.
        tools: OpenAI's definitions.

    Raises:
        ConfigError: the template refuses tools, does not show them to the model, or writes calls in another form.
    """

    def render(*chat: Mapping[str, Any], **settings: Any) -> str:
        return tokenizer.apply_chat_template(list(chat), tokenize=False, **{**template, **settings})

    name = tokenizer.name_or_path
    try:
        head = render(QUESTION, tools=tools, add_generation_prompt=True)
        shown = head != render(QUESTION, add_generation_prompt=True)
        plain = render(QUESTION, {"role": "assistant", "content": ANSWER}, tools=tools)
        called = render(QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, tools=tools)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the chat template of '{name}' refuses tools: {error}") from error
    if not shown:
        raise ConfigError(
            f"the chat template of '{name}' does not show tools to the model; remove 'tools', or set "
            "task.chat_template_kwargs.chat_template to one that does"
        )
    found = _form(plain, called)
    if found is None:
        raise ConfigError(
            f"the chat template of '{name}' writes a call of a tool as {called[_alike(plain, called) :]!r}; only JSON "
            "objects with the name and the arguments are read. Set task.chat_template_kwargs.chat_template to one that "
            "writes these"
        )
    return found


def _form(plain: str, called: str) -> CallFormat | None:
    """Return the form of the only call in ``called``, which equals ``plain`` before and after the answer."""
    head = _alike(plain, called)
    tail = _alike(plain[::-1], called[::-1])
    text = called[head : len(called) - tail]
    for start in (place for place, letter in enumerate(text) if letter in OPENINGS):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        [one, *_] = [*value, None] if isinstance(value, list) else [value]
        keys = {_kind(each): key for key, each in one.items()} if isinstance(one, dict) else {}
        if {"name", "arguments"} <= set(keys):
            return CallFormat(text[:start].strip(), text[end:].strip(), keys["name"], keys["arguments"])
    return None


def _alike(one: str, other: str) -> int:
    """Return the number of letters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _kind(value: Any) -> str | None:
    if value == NAME:
        return "name"
    return "arguments" if as_object(value) == ARGUMENTS else None


def _skip_space(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip())


def marked_text(ids: Any, tokenizer: Any, form: CallFormat) -> str:
    """Return the text of ids without special tokens, but for those that mark a call.

    Args:
        ids: of a turn, ``[R]``.
        tokenizer: a Hugging Face tokenizer.
        form: names the marks.
    """
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for token in (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special):
        if token not in form.begin and token not in form.end:
            text = text.replace(token, "")
    return text
