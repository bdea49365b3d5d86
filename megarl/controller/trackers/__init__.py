# SPDX-License-Identifier: Apache-2.0
"""Register trackers. A new tracker is a module and a line in ``TRACKERS``."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from megarl.controller.trackers.base import TrackedRun, Tracker, TrackerFactory
from megarl.controller.trackers.mlflow import MlflowTracker
from megarl.controller.trackers.swanlab import SwanLabTracker
from megarl.controller.trackers.tensorboard import TensorBoardTracker
from megarl.controller.trackers.trackio import TrackioTracker
from megarl.controller.trackers.wandb import WandbTracker
from megarl.errors import ConfigError
from megarl.plugins import pick_or_load

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "check_trackers", "load_tracker"]

# Name in ``train.trackers``, which is also its library's -> factory, which imports the library when it is called.
TRACKERS: dict[str, TrackerFactory] = {
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}


def load_tracker(name: str, folder: Path | None = None) -> TrackerFactory:
    """Return the factory that an entry of ``train.trackers`` names: a registered one, or ``file.py:Name``.

    Args:
        name: the entry.
        folder: see ``plugins.load_object``.

    Raises:
        ConfigError: no such tracker, or its library is not installed; the message has the command that installs it.
    """
    factory: TrackerFactory = pick_or_load(TRACKERS, name, "tracker", "train.trackers", folder)
    if name in TRACKERS and not is_installed(name):
        raise ConfigError(
            f"train.trackers has '{name}', whose library is not installed; run: pip install {name} (or leave it out)"
        )
    return factory


def is_installed(library: str) -> bool:
    """Return True if a library can be imported; a folder of its name, such as wandb leaves, is none."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown, named twice or not installed.

    Raises:
        ConfigError: the message names the tracker and the fix.
    """
    for name in names:
        load_tracker(name)
        if list(names).count(name) > 1:
            raise ConfigError(f"train.trackers names '{name}' twice; name it once")
