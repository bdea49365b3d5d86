# SPDX-License-Identifier: Apache-2.0
"""Write TensorBoard events to the run folder."""

from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun
from megarl.run_folder import TENSORBOARD


class TensorBoardTracker:
    """Writes ``RUN/tensorboard``. Events of steps that a resumed run repeats are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        after = run.step + 1 if run.resumed else None
        self._writer = SummaryWriter(str(run.folder / TENSORBOARD), purge_step=after)

    def log(self, row: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, row["step"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        self._writer.close()
