# SPDX-License-Identifier: Apache-2.0
"""Task ``jsonl``: the user's rows. One column is the prompt, all others are in ``prompt.data``.

The rows come from a ``.jsonl``, ``.parquet`` or ``.csv`` file, from a folder that ``datasets.save_to_disk`` wrote, or
from a data set on the Hugging Face hub.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, create_model

from megarl.config.base import Section
from megarl.errors import ConfigError
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, require_rows
from megarl.tasks.rows.datasets_source import read_dataset
from megarl.tasks.rows.files import Row, read_rows, rows_of
from megarl.tasks.rows.rows_task import RowsTask
from megarl.types import Prompt

Message = Mapping[str, Any]


class JsonlOptions(Section):
    prompt: str = Field("prompt", min_length=1)
    """Column of the prompt: a string, which becomes one user message, or a list of chat messages."""
    answer: str | None = Field(None, min_length=1)
    """Column of the answer. Without ``task.reward``, a response that equals it scores 1 and any other 0; white space
    around both is ignored."""
    split: str = Field("train", min_length=1)
    """Split, where ``task.path`` is a ``datasets`` folder or a hub id."""
    subset: str | None = None
    """Configuration of a data set on the hub that has several (``main`` of ``openai/gsm8k``)."""


def _messages(value: Any) -> tuple[Message, ...]:
    """Return the prompt as chat messages."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("it is empty")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise ValueError("it must be a string or a list of messages with role and content")
    if not value:
        raise ValueError("it is empty")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str) or not message[key].strip():
                raise ValueError(f"'{key}' of message {number} must be a non-empty string")
    if value[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's; leave it out: it is what the model is asked for")
    # Parquet fills keys that only some messages have with None.
    return tuple({key: item for key, item in message.items() if item is not None} for message in value)


def _answer(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError("it must be a non-empty string or an integer")
    return value


def row_model(options: JsonlOptions) -> type[Row]:
    """Build the model of a row: the fields that it must have; other columns are kept as they are."""
    fields: dict[str, Any] = {"prompt_": (Annotated[Any, AfterValidator(_messages)], Field(alias=options.prompt))}
    if options.answer is not None:
        fields["answer_"] = (Annotated[Any, AfterValidator(_answer)], Field(alias=options.answer))

    class AnyRow(Row):
        model_config = ConfigDict(extra="allow")

    return create_model("JsonlRow", __base__=AnyRow, **fields)


class JsonlTask(RowsTask[Row, JsonlOptions]):
    """One prompt per row, in the order of the rows, which are of ``row_model(options)``."""

    def prompt(self, name: str, row: Row) -> Prompt:
        """Return the messages of the prompt's column; the other columns are its ``data``."""
        columns = row.model_dump(by_alias=True)
        messages = columns.pop(self.options.prompt)
        return Prompt(id=name, messages=tuple(messages), data=columns)

    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score 1 for a response that equals the answer, else 0; white space around both is ignored.

        Metrics: ``correct``.
        """
        correct = float(response.strip() == str(prompt.data[str(self.options.answer)]).strip())
        return Reward(correct, {"correct": correct}, response.strip())


def build(context: TaskContext) -> JsonlTask:
    """Read the rows that ``task.path`` names.

    Raises:
        ConfigError: wrong options, no ``task.path``, no such file or data set; or neither ``task.reward`` nor
            ``task.options.answer``.
        DataError: bad rows, all in one message.
        UnsupportedError: another kind of file.
    """
    options = parse_options(context, JsonlOptions)
    if context.config.reward is None and options.answer is None:
        raise ConfigError(
            "task 'jsonl' has no reward of its own: set task.reward to file.py:function, or task.options.answer to the "
            "column that a response must equal"
        )
    if options.answer == options.prompt:
        raise ConfigError(f"task.options.answer is '{options.answer}', which is the prompt's column too; name another")
    place, model = require_rows(context), row_model(options)
    if place is not None and place.is_file():
        return JsonlTask(read_rows(place, model), options, place.stem)
    source = str(place or context.config.path)
    rows = rows_of(read_dataset(place, source, options.split, options.subset), model, source)
    return JsonlTask(rows, options, source.rpartition("/")[2])
