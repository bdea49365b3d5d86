# SPDX-License-Identifier: Apache-2.0
"""Define the settings that all benches have, and parse them.

The ``settings`` of no bench import torch or transformers, so that a typo is reported at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError

from megarl.bench.shapes import SHAPES
from megarl.config.base import Section
from megarl.config.checks import read_model_shape
from megarl.config.explain import explain
from megarl.errors import ConfigError, nearest
from megarl.hub import local_model


class Measured(Section):
    """The settings that all benches have."""

    model: str
    """A named shape with random weights, or a Hugging Face folder."""
    layers: int | None = Field(None, ge=1)
    """Shorten a named shape to this many layers. Default: all."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` uses CUDA if torch sees a GPU."""
    seed: int = Field(0, ge=0)
    """Seed of weights and tokens."""


S = TypeVar("S", bound=Measured)


def parse(kind: type[S], model: str, defaults: dict[str, Any], overrides: Sequence[str]) -> S:
    """Parse the settings of a bench.

    Args:
        kind: the settings.
        model: a key of ``SHAPES``, or a folder with a config.json, or a hub id.
        defaults: what the model changes in the defaults.
        overrides: ``"key=value"`` strings, the value in YAML.

    Raises:
        ConfigError: a shape, key or value is unknown.
    """
    tree: dict[str, Any] = {"model": model if model in SHAPES else local_model(model)} | defaults
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([_checked(override) for override in overrides]))
        tree |= given
        settings = kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, tree, kind)) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"bench: {str(error).splitlines()[0]}") from error
    model_config(settings.model, settings.layers)
    return settings


def _checked(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key or not value:
        raise ConfigError(f"override '{override}' must have the form key=value")
    return override


def model_config(model: str, layers: int | None = None) -> dict[str, Any]:
    """Return the model's config.json, of a named shape or from its folder.

    Args:
        model: a named shape or a folder.
        layers: number of layers that a named shape is shortened to; None: all.

    Raises:
        ConfigError: the model is neither a named shape nor a Hugging Face folder; or it has no ``layers`` to leave out.
    """
    if model in SHAPES:
        config = SHAPES[model].config()
        if layers is not None and layers > config["num_hidden_layers"]:
            raise ConfigError(f"layers is {layers}, but '{model}' has {config['num_hidden_layers']}; use fewer")
        return config | ({} if layers is None else {"num_hidden_layers": layers})
    if layers is not None:
        raise ConfigError(f"layers is {layers}, but '{model}' is a folder; only named shapes can be shortened")
    try:
        return read_model_shape(model)
    except ConfigError as error:
        known = ", ".join(SHAPES)
        raise ConfigError(f"{error} or a named shape{nearest(Path(model).name, SHAPES)} (known: {known})") from None
