# SPDX-License-Identifier: Apache-2.0
"""Send a run to trackio: a local data base, or a Hugging Face Space (``TRACKIO_SPACE_ID``)."""

import os
from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun


class TrackioTracker:
    """A run of trackio, which knows it by its name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", run.project),
            name=run.name,
            config={**run.config, "folder": str(run.folder)},
            resume="allow",
        )

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and wait until everything is sent."""
        self._run.finish()
