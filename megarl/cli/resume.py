"""Which config a run starts from: the recipe's, or on resume the run's own."""

from collections.abc import Sequence
from pathlib import Path

from megarl.config import RunConfig, load_config
from megarl.config.train import AUTO
from megarl.errors import ConfigError
from megarl.files import user_path

KEY = "train.resume="


def load_run_config(recipe: Path, overrides: Sequence[str]) -> RunConfig:
    """Load the recipe; with ``train.resume=RUN``, the config that RUN was started with, so that it goes on as it was.

    Overrides given now apply on top in both cases. ``train.resume=auto`` looks for the run later: it is one that has
    the recipe's settings.

    Raises:
        ConfigError: see ``load_config``; or RUN is not a run folder.
    """
    resume = next((item.removeprefix(KEY) for item in reversed(overrides) if item.startswith(KEY)), "")
    if resume in ("", "null", AUTO):
        return load_config(recipe, overrides)
    saved = user_path("train.resume", resume) / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"train.resume is '{resume}', which is not a run folder: it holds no config.yaml")
    return load_config(saved, overrides)
