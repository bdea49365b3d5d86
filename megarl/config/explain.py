# SPDX-License-Identifier: Apache-2.0
"""Explain pydantic's errors in the terms of a recipe: field, value, what is allowed, nearest name."""

import re
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from megarl.errors import MegarlError, nearest

MAX_SHOWN = 80  # characters of a wrong value that are shown


def explain(error: ValidationError, tree: Any, section: type[BaseModel], prefix: str = "") -> str:
    """Return one line for each wrong field.

    Args:
        error: the error that pydantic raised for ``tree``.
        tree: the plain value that was validated.
        section: the model that it was validated against; its fields are the allowed ones.
        prefix: dotted name of ``tree`` within the recipe (``"task.options"``), which is put before every field.
    """
    problems: dict[tuple[str, ...], list[Any]] = {}
    for problem in error.errors():
        problems.setdefault(_path_in_tree(problem, tree), []).append(problem)
    # Of the alternatives of a union, report the one that matched the value to the greatest depth.
    deepest = [path for path in problems if not any(_is_below(other, path) for other in problems)]
    return "\n".join(_line(path, problems[path], section, prefix) for path in deepest)


def _path_in_tree(problem: Any, tree: Any) -> tuple[str, ...]:
    """Return ``loc`` without pydantic's tags for a union's alternatives (``"str"``), which are no keys of the tree."""
    path: list[str] = []
    node = tree
    for depth, part in enumerate(problem["loc"], start=1):
        if _holds(node, part):
            node = node[part]
        elif problem["type"] != "missing" or depth < len(problem["loc"]):
            continue
        path.append(str(part))
    return tuple(path)


def _holds(node: Any, part: str | int) -> bool:
    if isinstance(node, dict):
        return part in node
    return isinstance(node, list) and isinstance(part, int) and part < len(node)


def _is_below(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(path) > len(other) and path[: len(other)] == other


def _line(path: tuple[str, ...], problems: list[Any], section: type[BaseModel], prefix: str) -> str:
    """Return the line for all problems of one field."""
    name = ".".join([prefix, *path] if prefix else path)
    first = problems[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, MegarlError):
        return str(cause)
    if isinstance(cause, ValueError):
        return f"{name}: {cause}" if name else str(cause)
    if first["type"] == "extra_forbidden":
        known = _fields_at(section, path[:-1])
        return f"unknown key '{name}'{nearest(path[-1], known)} (known: {', '.join(known)})"
    if first["type"] == "missing":
        return f"'{name}' is required and missing"
    allowed = ", or ".join(dict.fromkeys(_allowed(problem) for problem in problems))
    return f"'{name}' is {_shown(first['input'])}: {allowed}"


def _allowed(problem: Any) -> str:
    """Describe what is allowed, from one problem; adds the nearest name if there is a fixed set of names."""
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "it should be a mapping of keys to values"
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "literal_error":
        message += nearest(str(problem["input"]), re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    return message


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _fields_at(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the field names of the section at ``path``."""
    for part in path:
        if part.isdecimal():  # an entry of a list, whose section is found already
            continue
        field = section.model_fields.get(part)
        candidates = [field.annotation, *typing.get_args(field.annotation)] if field else []
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)
