# SPDX-License-Identifier: Apache-2.0
"""Send a run to Weights & Biases. ``WANDB_MODE=offline`` keeps it in the run folder, for ``wandb sync``."""

import secrets
from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun
from megarl.report.panels import numbers


class WandbTracker:
    """A run of Weights & Biases. Metrics have ``step`` as their axis, since wandb's own step cannot go back."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            **run.init_arguments("WANDB_PROJECT"),
            id=run.id or secrets.token_hex(4),
            resume="allow",
            dir=str(run.folder),
            # The screen is this program's; wandb would record its progress bar.
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = self._run.id
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._run.log(dict(row))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary, and wait until everything is sent."""
        self._run.summary.update(numbers(summary or {}))
        self._run.finish(exit_code=0 if summary is not None else 1)
