# SPDX-License-Identifier: Apache-2.0
"""Load the config that a run starts from: the recipe's, or when resuming the run's own."""

from collections.abc import Sequence
from pathlib import Path

from megarl.config import RunConfig, check_run, load_config
from megarl.config.sections.train import AUTO
from megarl.errors import ConfigError
from megarl.files import user_path
from megarl.hub import local_model
from megarl.run_folder import saved_config

KEY = "train.resume="


def load_run_config(recipe: Path, overrides: Sequence[str]) -> RunConfig:
    """Load the recipe, or with ``train.resume=RUN`` the config that RUN was started with.

    In both cases the given overrides apply on top. ``train.resume=auto`` loads the recipe; the run with the recipe's
    settings is looked up later.

    Raises:
        ConfigError: see ``load_config`` and ``check_run``; or RUN is not a run folder.
    """
    run = _named(overrides)
    fresh = run in ("", "null", AUTO)
    config = load_config(recipe, overrides) if fresh else saved_config(run, "train.resume", overrides)
    _check(config, recipe.parent)
    return config


def load_resumed_config(run: str, overrides: Sequence[str]) -> RunConfig:
    """Load the config that RUN was started with, with overrides on top (`megarl resume RUN`).

    Raises:
        ConfigError: see ``load_config`` and ``check_run``; or RUN is not a run folder; or an override names another
            run.
    """
    if other := _named(overrides):
        raise ConfigError(f"override '{KEY}{other}': `megarl resume {run}` says already what is resumed; remove it")
    folder = user_path("RUN", run)
    config = saved_config(str(folder), "RUN", overrides)
    _check(config)
    return config.model_copy(update={"train": config.train.model_copy(update={"resume": str(folder)})})


def _check(config: RunConfig, folder: Path | None = None) -> None:
    """Check the config; of a model on the hub, only ``config.json`` is downloaded for it."""
    path = local_model(config.model.path, config_only=True)
    check_run(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}), folder)


def _named(overrides: Sequence[str]) -> str:
    """Return the last value of ``train.resume`` among the overrides, or ""."""
    return next((item.removeprefix(KEY) for item in reversed(overrides) if item.startswith(KEY)), "")
