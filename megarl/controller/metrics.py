"""What a run leaves behind: config, metrics, completions, checkpoints, summary, plot."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checkpoint_engine.manager import SyncReport
from megarl.config import RunConfig, dump_config
from megarl.controller.background import Background
from megarl.controller.memory import MemoryWatch
from megarl.controller.roles import TrainerGroup
from megarl.controller.rollout import Rollout
from megarl.controller.screen import Screen
from megarl.errors import CheckpointError
from megarl.files import discard

METRICS, SUMMARY, PLOT, CONFIG = "metrics.jsonl", "summary.json", "plot.png", "config.yaml"
# Steps that reward_first and reward_last average over.
ENDS = 3
# Within the 30 s in which a run that fails or is interrupted must be gone.
RESCUE_SECONDS = 15.0


class Recorder:
    """Writes the run folder, TensorBoard events and the screen.

    Attributes:
        folder: the run folder.
        rows: one dictionary per step, those of an earlier session included.
    """

    def __init__(self, folder: Path, config: RunConfig, screen: Screen) -> None:
        """Make the folder and save the resolved config.

        Args:
            folder: new, or that of a run to resume.
            config: resolved.
            screen: where progress is shown.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.config, self.screen = folder, config, screen
        for name in ("checkpoints", "rollouts"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # Without train.resume: the saved config is that of the run, however often it was continued.
        train = config.train.model_copy(update={"resume": None})
        (folder / CONFIG).write_text(dump_config(config.model_copy(update={"train": train})))
        self.rows: list[dict[str, Any]] = []
        self.syncs: list[SyncReport] = []
        self._stops: list[float] = []
        self._saving: Path | None = None
        self._rollouts = Background("rollouts")
        self.memory = MemoryWatch()
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._started = time.perf_counter()

    def resume_at(self, step: int) -> None:
        """Keep the metrics up to a checkpoint; later rows, whose weights are lost, move to another file."""
        file = self.folder / METRICS
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        self.rows = [row for row in rows if row["step"] <= step]
        if dropped := [row for row in rows if row["step"] > step]:
            with (self.folder / "metrics.discarded.jsonl").open("a") as handle:
                handle.writelines(json.dumps(row) + "\n" for row in dropped)
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        partial.rename(file)

    def phase(self, name: str) -> None:
        """Show what is being done."""
        self.screen.phase(name)

    def note(self, report: SyncReport) -> None:
        """Remember a sync for the summary."""
        self.syncs.append(report)

    def write_rollout(self, step: int, rollout: Rollout) -> None:
        """Begin to write a step's completions, in a thread."""
        file = self.folder / "rollouts" / f"step-{step:06d}.jsonl"
        self._rollouts.start(lambda: rollout.write(file))

    def rollout_written(self) -> float:
        """Wait for ``write_rollout``; the seconds that it took."""
        return self._rollouts.wait()

    def step(self, row: dict[str, Any]) -> None:
        """Write one step everywhere."""
        self.rows.append(row)
        with (self.folder / METRICS).open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        for name, value in row.items():
            self._writer.add_scalar(name, value, row["step"])
        self.screen.step(row)

    def checkpoint(self, trainers: TrainerGroup, step: int, state: dict[str, Any]) -> None:
        """Start saving a checkpoint, once the one before is complete; delete those that are no longer kept."""
        self.phase("checkpoint")
        target = self.folder / "checkpoints" / f"step-{step:06d}"
        if target.exists():  # left by a session whose later steps were discarded
            discard(target)
        start = time.perf_counter()
        self._saving = target
        trainers.call("save_checkpoint", str(target), state)
        self._stops.append(time.perf_counter() - start)
        self._prune()

    def _prune(self) -> None:
        for old in checkpoints(self.folder)[: -self.config.train.keep_checkpoints]:
            discard(old)

    def rescue(self, trainers: TrainerGroup) -> None:
        """Let the checkpoint that is being written become complete before the trainers are killed."""
        target, self._saving = self._saving, None
        if target is None or is_complete(target):
            return
        self.phase("finishing the checkpoint")
        # Answered at once unless rank 0 is busy, maybe for ever; then the folder itself tells.
        answer = trainers.start_on_rank_zero("finish_checkpoint")
        deadline = time.monotonic() + RESCUE_SECONDS
        while not is_complete(target) and not answer.done() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not is_complete(target):
            cause = answer.exception() if answer.done() else f"no answer within {RESCUE_SECONDS:.0f} s"
            self.screen.say(f"checkpoint '{target}' is not complete: {cause or 'its save was interrupted'}")

    def finish(self, trainers: TrainerGroup) -> dict[str, Any]:
        """Write the adapter, the summary and the plot; return the summary."""
        from megarl.controller.plot import plot_run

        trainers.call("finish_checkpoint")
        self._saving = None
        self._prune()
        trainers.call("save_adapter", str(self.folder / "adapter"))
        device = sum(trainers.call("peak_device_gib"))
        summary = summarise(self.rows) | {
            "seconds": time.perf_counter() - self._started,
            "peak_memory_gib": self.memory.stop(),
            "peak_device_memory_gib": device,
            "checkpoint_stop_seconds": float(np.median(self._stops)) if self._stops else 0.0,
            "first_sync_seconds": {report.kind: sum(report.seconds.values()) for report in self.syncs},
        }
        (self.folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        plot_run(self.rows, self.folder / PLOT)
        self.close()
        return summary

    def close(self) -> None:
        """Release files and threads; safe to call twice."""
        self.memory.stop()
        self._writer.close()


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint can be resumed from: the file that names its contents is there."""
    return (checkpoint / "state.json").is_file()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    return sorted(filter(is_complete, (folder / "checkpoints").glob("step-*")))


def last_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(f"train.resume is '{folder}', which holds no complete checkpoint (checkpoints/step-*)")
    return found[-1]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers a run is judged by, over all its steps."""
    if not rows:
        return {"steps": 0}

    def series(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows if name in row], dtype=float)

    return {
        "steps": len(rows),
        "reward_first": float(series("reward")[:ENDS].mean()),
        "reward_last": float(series("reward")[-ENDS:].mean()),
        "reward_max": float(series("reward").max()),
        "mismatch_mean": float(series("mismatch_mean").mean()),
        "mismatch_max": float(series("mismatch_max").max()),
        "train_tokens_per_second": float(series("trained_tokens").sum() / series("seconds/train").sum()),
        "sample_tokens_per_second": float(series("sampled_tokens").sum() / series("seconds/sample").sum()),
        "sync_seconds": float(np.median(series("seconds/sync"))),
    }
