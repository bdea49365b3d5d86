# SPDX-License-Identifier: Apache-2.0
"""List the settings of a run that differ from the defaults, and write a config with these settings marked."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.config.load import to_yaml
from megarl.config.run import RunConfig

INDENT = "  "


def setting_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of a section, in the order of their definition."""
    for name, field in section.model_fields.items():
        if _is_section(field):
            yield from setting_names(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name


def changes(config: BaseModel) -> dict[str, Any]:
    """Return, as a tree, the settings that differ from their defaults or have none; other sections are left out."""
    tree: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            if inner := changes(value):
                tree[name] = inner
        elif value != _default(field):
            tree[name] = config.model_dump(include={name})[name]
    return tree


def changed_yaml(config: RunConfig) -> str:
    """Return ``changes`` as YAML."""
    tree = changes(config)
    return to_yaml(tree) if tree else ""


def annotate(config: BaseModel) -> str:
    """Return the whole config as YAML that ``load_config`` reads; comments give the defaults of changed settings."""
    parts = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            parts.append(f"{name}:\n{textwrap.indent(annotate(value), INDENT)}")
            continue
        text = to_yaml(config.model_dump(include={name}))
        if value != _default(field):
            text = _marked(text, field)
        parts.append(text)
    return "".join(parts)


def _marked(text: str, field: FieldInfo) -> str:
    default = _default(field)
    note = "# required" if default is PydanticUndefined else f"# default: {json.dumps(default)}"
    first, _, rest = text.partition("\n")
    # A comment after the first line of a folded text would become part of the text.
    return f"{first}  {note}\n{rest}" if not rest or first.endswith(":") else f"{note}\n{text}"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
