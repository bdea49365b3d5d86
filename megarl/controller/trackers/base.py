# SPDX-License-Identifier: Apache-2.0
"""Define a tracker: a service, or a file format, to which a run sends its config, metrics and summary."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for.

    Attributes:
        folder: the run folder. A tracker may write below it.
        name: the folder's name.
        project: ``train.tracker_project``: the name under which the tracker lists the run among others.
        config: every setting, ``section.key`` -> JSON-able value.
        step: last step that was done before; 0 for a new run, and for one whose first steps were lost.
        resumed: True if the tracker was opened for this run before.
        id: the tracker's own name of the run, as its ``id`` was in the first session; None for a new run.
    """

    folder: Path
    name: str
    project: str
    config: Mapping[str, Any]
    step: int = 0
    resumed: bool = False
    id: str | None = None

    def init_arguments(self, project_variable: str) -> dict[str, Any]:
        """Return the arguments ``project``, ``name`` and ``config`` of a service's ``init``.

        Args:
            project_variable: the service's environment variable, which goes before ``project``.
        """
        project = os.environ.get(project_variable, self.project)
        return {"project": project, "name": self.name, "config": {**self.config, "folder": str(self.folder)}}


class Tracker(Protocol):
    """The receiver of one run's rows. One thread makes and calls it, in order. An exception of it does not end the run.

    A tracker may have an attribute ``id``, a string: a resumed run gets it back as ``TrackedRun.id``.
    """

    def log(self, row: Mapping[str, float]) -> None:
        """Send the metrics of a step. ``row["step"]`` is its number, from 1; a resumed run may repeat one."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the run. ``summary`` holds what ``summary.json`` does; None if the run ended early."""


# A class or a function that opens a tracker. What it raises ends a new run, before anything else is started.
TrackerFactory = Callable[[TrackedRun], Tracker]
