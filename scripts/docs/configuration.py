# SPDX-License-Identifier: Apache-2.0
"""Fill docs/configuration.md from the models in megarl/config, so that it is never outdated (a mkdocs hook)."""

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.config import RunConfig

PLACE = "<!-- settings -->"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the page; mkdocs calls this for every page."""
    return markdown.replace(PLACE, "\n".join(reference())) if PLACE in markdown else markdown


def reference() -> Iterator[str]:
    """Yield lines of Markdown: one section for each section of the config."""
    for name, field in RunConfig.model_fields.items():
        yield from section(name, model_of(field))


def section(name: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield one table for a section, then those of the sections within it."""
    yield from (f"## {name}", "", "| setting | allowed | default | |", "| --- | --- | --- | --- |")
    nested = {key: field for key, field in model.model_fields.items() if is_model(field.annotation)}
    for key, field in model.model_fields.items():
        if key not in nested:
            yield f"| `{name}.{key}` | {cell(allowed(field))} | {default(field)} | {cell(text(field))} |"
    yield ""
    for key, field in nested.items():
        yield from section(f"{name}.{key}", model_of(field))
    for key, field in model.model_fields.items():
        for item in typing.get_args(field.annotation):
            if is_model(item):
                yield from section(f"{name}.{key}[]", item)


def text(field: FieldInfo) -> str:
    """Return the docstring below the field, on one line."""
    return " ".join((field.description or "").replace("``", "`").split())


def default(field: FieldInfo) -> str:
    """Return the value that the field has if a recipe leaves it out."""
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.get_default(call_default_factory=True)
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def allowed(field: FieldInfo) -> str:
    """Return type and bounds in YAML's terms."""
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(item, name)
    ]
    return " ".join([words(field.annotation), *bounds])


def words(kind: Any) -> str:
    """Return a type's name in YAML's terms."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(part) for part in arguments)
    if origin is list:
        return f"list of {'mappings' if is_model(arguments[0]) else words(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", type(None): "`null`"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def cell(words: str) -> str:
    """Escape text for a cell of a table."""
    return words.replace("|", "\\|")


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def model_of(field: FieldInfo) -> type[BaseModel]:
    assert is_model(field.annotation)
    return typing.cast(type[BaseModel], field.annotation)
