# SPDX-License-Identifier: Apache-2.0
"""Save a run's checkpoints, and delete those that are not to be kept."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.files import discard
from megarl.run_folder import CHECKPOINTS, STEP, checkpoints, is_complete

# Shorter than the 30 s within which a failed or interrupted run must end.
RESCUE_SECONDS = 15.0


class CheckpointKeeper:
    """Saves the checkpoints of a run folder, one at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        """
        Args:
            folder: the run folder.
            keep: number of complete checkpoints to keep (``train.keep_checkpoints``).
        """
        self._folder, self._keep = folder, keep
        self._stops: list[float] = []
        self._saving: Path | None = None

    @property
    def is_saving(self) -> bool:
        """True if the newest checkpoint is not complete yet."""
        return self._saving is not None and not is_complete(self._saving)

    @property
    def stop_seconds(self) -> float:
        """Median seconds for which a save stopped the training; 0 before the first one."""
        return float(np.median(self._stops)) if self._stops else 0.0

    def save(self, trainers: TrainerGroup, step: int, state: dict[str, Any]) -> None:
        """Start to save a checkpoint, after the one before is complete, and delete those that are not to be kept."""
        target = self._folder / CHECKPOINTS / STEP.format(step)
        if target.exists():  # from a session whose later steps were discarded
            discard(target)
        start = time.perf_counter()
        self._saving = target
        trainers.call("save_checkpoint", str(target), state)
        self._stops.append(time.perf_counter() - start)
        self._prune()

    def finish(self, trainers: TrainerGroup) -> None:
        """Wait until the last checkpoint is complete, and delete those that are not to be kept."""
        trainers.call("finish_checkpoint")
        self._saving = None
        self._prune()

    def forget(self) -> None:
        """Do not wait for the newest checkpoint any more: its writers are gone."""
        self._saving = None

    def rescue(self, trainers: TrainerGroup) -> str | None:
        """Wait until the checkpoint that is being written is complete; return why it is not, or None."""
        target, self._saving = self._saving, None
        if target is None:
            return None
        # Rank 0 answers at once unless it is busy or hangs; so the folder is checked too.
        answer = trainers.start_on_rank_zero("finish_checkpoint")
        deadline = time.monotonic() + RESCUE_SECONDS
        while not is_complete(target) and not answer.done() and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_complete(target):
            return None
        cause = answer.exception() if answer.done() else f"no answer within {RESCUE_SECONDS:.0f} s"
        return f"checkpoint '{target}' is not complete: {cause or 'its save was interrupted'}"

    def _prune(self) -> None:
        for old in checkpoints(self._folder)[: -self._keep]:
            discard(old)
