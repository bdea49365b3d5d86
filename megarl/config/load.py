# SPDX-License-Identifier: Apache-2.0
"""Read a YAML recipe and dotted overrides into a ``RunConfig``; report anything wrong as one clear error.

Imports neither torch nor vLLM, so that a typo is reported in a fraction of a second.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megarl.config.base import Section
from megarl.config.explain import explain
from megarl.config.run import RunConfig
from megarl.errors import ConfigError
from megarl.files import user_path

AnySection = TypeVar("AnySection", bound=Section)


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply overrides.

    Args:
        recipe: path of the YAML file. ``${oc.env:NAME}`` and other OmegaConf interpolations are resolved.
        overrides: each ``"section.key=value"``, with the value in YAML (``train.steps=3``,
            ``lora.target_modules=[q_proj]``).

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value, or fields that contradict each other.
        UnsupportedError: a layout or option that is valid but not proven.
    """
    return _resolve(_read_recipe(recipe), overrides, f"recipe '{recipe}'")


def override_config(tree: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Apply overrides to a plain dictionary and validate it, as ``load_config`` does."""
    return _resolve(OmegaConf.create(_escape(dict(tree))), overrides, "overrides")


def parse_config(tree: Any) -> RunConfig:
    """Validate a plain dictionary.

    Raises:
        ConfigError: some fields are wrong; the message has one line for each.
        UnsupportedError: a cross-field check raises it.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, tree, RunConfig)) from None


def parse_section(kind: type[AnySection], name: str, given: AnySection | Mapping[str, Any] | None) -> AnySection:
    """Build one section from a plain dictionary; a section is returned as it is.

    Args:
        kind: the section's class.
        name: the section's name, for messages (``"lora"``).
        given: None gives the defaults.

    Raises:
        ConfigError: naming each wrong field, its value and what is allowed.
    """
    if isinstance(given, kind):
        return given
    tree = dict(given or {})
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{name}: {explain(error, tree, kind)}") from None


def dump_config(config: RunConfig) -> str:
    """Return the resolved config, defaults included, as YAML that ``load_config`` reads back."""
    return to_yaml(config.model_dump())


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return settings as YAML that ``load_config`` reads, in their order."""
    # Use OmegaConf's dumper because its YAML differs from PyYAML's: a bare 1e-3 is a number, in PyYAML a string.
    return OmegaConf.to_yaml(OmegaConf.create(_escape(dict(tree))), sort_keys=False)


def _resolve(tree: DictConfig, overrides: Sequence[str], source: str) -> RunConfig:
    for override in overrides:
        tree = _apply_override(tree, override)
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        cause = _first_line(error)
        if unset := re.search(r"Environment variable '(.+)' not found", cause):
            cause = f"the environment variable {unset[1]} is not set; set it, or give {error.full_key}=VALUE"
        raise ConfigError(f"{source}, key '{error.full_key}': {cause}") from error
    return parse_config(plain)


def _read_recipe(recipe: str | Path) -> DictConfig:
    file = user_path("recipe", recipe)
    if not file.is_file():
        raise ConfigError(f"recipe '{recipe}' {'is not a file' if file.exists() else 'does not exist'}")
    expected = f"recipe '{recipe}' must hold a mapping of sections ({', '.join(RunConfig.model_fields)})"
    try:
        text = file.read_text(encoding="utf-8")
        # Check the type first: for a bare scalar, OmegaConf raises an OSError or makes a one-key mapping.
        if not isinstance(yaml.safe_load(text), dict):
            raise ConfigError(expected)
        tree = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe '{recipe}' is not valid YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"recipe '{recipe}' cannot be read: {error.strerror}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(expected)
    return tree


def _apply_override(tree: DictConfig, override: str) -> DictConfig:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override '{override}' must have the form section.key=value")
    if value in ("", "???"):  # OmegaConf reads the first as null and skips the second
        raise ConfigError(f"override '{override}' has no value; write '{key}=null' or '{key}=\"\"' if you mean that")
    try:
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist([override]))
        if value.strip() == "{}":  # merging it would change nothing
            OmegaConf.update(merged, key, {}, merge=False)
    except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"override '{override}' cannot be applied: {_first_line(error)}") from error
    assert isinstance(merged, DictConfig)  # merging into a mapping gives a mapping
    return merged


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text; OmegaConf appends lines about its internals."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _escape(value: Any) -> Any:
    """Return ``value`` with every ``${`` escaped, so that nothing is interpolated when it is read back."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
