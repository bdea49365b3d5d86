# SPDX-License-Identifier: Apache-2.0
"""Send a run to SwanLab. ``SWANLAB_MODE=offline`` (or ``local``) keeps it in the run folder."""

from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun
from megarl.report.panels import numbers


class SwanLabTracker:
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            **run.init_arguments("SWANLAB_PROJ_NAME"),
            log_dir=str(run.folder / "swanlog"),
            id=run.id,
            resume="allow",
        )
        self.id = self._run.id

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._run.log(dict(row), step=int(row["step"]))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and wait until everything is sent."""
        if summary is not None:
            self._run.log({f"summary/{name}": value for name, value in numbers(summary).items()})
            self._run.finish()
        else:
            self._run.finish(state="aborted")
