# SPDX-License-Identifier: Apache-2.0
"""Send a run to trackio: a local data base, or a Hugging Face Space (``TRACKIO_SPACE_ID``)."""

from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun
from megarl.report.panels import numbers


class TrackioTracker:
    """A run of trackio, which knows a resumed run by its name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        resume = "allow" if run.id else "never"
        self._run = trackio.init(**run.init_arguments("TRACKIO_PROJECT"), resume=resume)
        self.id = run.name
        self._step = run.step

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._step = int(row["step"])
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=self._step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and wait until everything is sent."""
        if summary is not None:
            self._run.log({f"summary/{name}": value for name, value in numbers(summary).items()}, step=self._step)
        self._run.finish()
