# SPDX-License-Identifier: Apache-2.0
"""Write the files of a run: config, metrics, completions, checkpoints, summary, plot."""

import json
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megarl.checkpoint_engine.phases import SyncReport
from megarl.config import RunConfig, dump_config
from megarl.config.resume import settings_of
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.recording.background import Background
from megarl.controller.recording.checkpoint_keeper import CheckpointKeeper
from megarl.controller.recording.memory import MemoryWatch
from megarl.controller.recording.resumption import Resumption
from megarl.controller.recording.screen import Screen
from megarl.controller.recording.stall import StallWatch
from megarl.controller.recording.summary import coverage, summarise
from megarl.controller.rollouts.evaluation import Evaluated
from megarl.controller.rollouts.rollout import Rollout
from megarl.controller.trackers.base import TrackedRun
from megarl.controller.trackers.feeds import Feeds
from megarl.errors import CheckpointError, first_few
from megarl.evaluation.files import write_evaluation
from megarl.files import append_line, read_json, write_text, writing
from megarl.folder_lock import FolderLock
from megarl.report.panels import evaluation_numbers
from megarl.run_folder import (
    ADAPTER,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PLOT,
    ROLLOUTS,
    STEP,
    SUMMARY,
    checkpoints,
    evaluations,
    step_of,
)


class Recorder:
    """Writes the run folder, feeds the trackers, and shows progress on the screen.

    Attributes:
        folder: the run folder.
        rows: metrics, one dictionary per step, including those of earlier sessions.
    """

    def __init__(self, folder: Path, config: RunConfig, screen: Screen) -> None:
        """Write nothing yet; ``begin`` does.

        Args:
            folder: the folder of a new run, or of a run to resume.
            config: the resolved config.
            screen: shows the progress.
        """
        self.folder, self.config, self.screen = folder, config, screen
        self.rows: list[dict[str, Any]] = []
        self.syncs: list[SyncReport] = []
        self._checkpoints = CheckpointKeeper(folder, config.train.keep_checkpoints)
        self._rollouts = Background("rollouts")
        self._example: tuple[str, str, float] | None = None
        self._stall = StallWatch()
        self.memory = MemoryWatch()
        self._lock: FolderLock | None = None
        self._begun = False
        self._feeds = Feeds(config.train.trackers, partial(screen.say, style="bold yellow"))
        self._dropped: int | None = None
        self._started = time.perf_counter()

    def hold(self) -> None:
        """Lock the folder for this run, until ``close``.

        Raises:
            CheckpointError: another run holds the lock, or the folder cannot be written.
        """
        with writing(self.folder):
            self._lock = FolderLock(self.folder)
        if not self._lock.held:
            self.screen.say(f"'{self.folder}' is on a file system without locks: do not resume it twice at once")

    def begin(self, resumption: Resumption | None = None) -> None:
        """Save the resolved config and open the files. Called once everything has been loaded.

        Args:
            resumption: for a resumed run: whatever is later than its checkpoint is set aside.

        Raises:
            CheckpointError: the folder cannot be written.
            ConfigError: a tracker of a new run cannot be opened.
        """
        with writing(self.folder):
            if resumption:
                resumption.apply()
                self.rows = list(resumption.rows)
            for name in (CHECKPOINTS, ROLLOUTS):
                (self.folder / name).mkdir(exist_ok=True)
            # Without the settings of this resume, so that the saved config is the run's after any number of resumes.
            train = self.config.train.model_copy(update={"resume": None, "resume_step": None, "resume_changes": []})
            write_text(self.folder / CONFIG, dump_config(self.config.model_copy(update={"train": train})))
        self._begun = True
        step, project = resumption.step if resumption else 0, self.config.train.tracker_project
        run = TrackedRun(
            self.folder, self.folder.name, project, settings_of(self.config), step, resumed=resumption is not None
        )
        self.phase("trackers")  # some take seconds to import
        self._feeds.open(run)

    def go_back(self, resumption: Resumption) -> None:
        """Set aside what is later than a checkpoint of this session, and go on from there."""
        self._rollouts.wait()
        self._checkpoints.forget()
        self._feeds.finish(None)
        self.begin(resumption)

    def phase(self, name: str) -> None:
        """Show the current phase."""
        self.screen.phase(name)

    def note(self, report: SyncReport) -> None:
        """Keep the report of a sync for the summary."""
        self.syncs.append(report)

    def note_dropped(self, dropped: int, kept: int) -> None:
        """Show how many prompts are left out for their length, and keep the number for the summary."""
        self._dropped = dropped
        limit = self.config.sampler.max_prompt_tokens
        self.screen.say(
            f"task.long_prompts=drop: {dropped} of {dropped + kept} prompts are left out; they are longer than "
            f"sampler.max_prompt_tokens ({limit})",
            style="bold yellow",
        )

    def write_rollout(self, step: int, rollout: Rollout, decode: Callable[[Any], str] | None = None) -> None:
        """Start to write a step's completions, in a thread; see ``Rollout.write``."""
        self._example = rollout.example()
        self.check_folder()
        file = self.folder / ROLLOUTS / f"{STEP.format(step)}.jsonl"

        def write() -> None:
            with writing(file):
                rollout.write(file, decode)

        self._rollouts.start(write)

    def rollout_written(self) -> float:
        """Wait until ``write_rollout`` is done; return the seconds that it took.

        Raises:
            CheckpointError: the disk is full, or the folder was deleted.
        """
        seconds = self._rollouts.wait()
        self._prune_rollouts()
        return seconds

    def step(self, row: dict[str, Any]) -> None:
        """Write one step's metrics, send them to the trackers and show them.

        Raises:
            CheckpointError: the disk is full, or the folder was deleted. The file then ends with the step before.
        """
        self.check_folder()
        with writing(self.folder / METRICS):
            append_line(self.folder / METRICS, json.dumps(row))
        self.rows.append(row)
        self._feeds.log(row)
        self.screen.step(row)
        if self._example:
            self.screen.completion(*self._example)
        if warning := self._stall.look(row):
            self.screen.say(warning, style="bold yellow")

    def say_how_to_go_on(self) -> None:
        """Show the folder of a run that ended early, and the command that continues it."""
        if not self._begun:  # the folder holds nothing of this run
            return
        saved = checkpoints(self.folder)
        advice = "it holds no checkpoint yet: start it again"
        if saved:
            advice = f"go on after step {step_of(saved[-1])}: megarl resume {shlex.quote(str(self.folder))}"
        self.screen.say(f"the run is in {self.folder}; {advice}")

    def evaluation(self, step: int, version: int, evaluated: Mapping[str, Evaluated]) -> dict[str, float]:
        """Save and show an evaluation; return its metrics as they stand in a row."""
        self.check_folder()
        results = {key: one.result for key, one in evaluated.items()}
        write_evaluation(
            self.folder, step, version, results, {key: one.rollout.write for key, one in evaluated.items()}
        )
        self.screen.evaluation(step, results)
        return {name: value for result in results.values() for name, value in result.row().items()}

    def evaluated(self) -> dict[int, dict[str, float]]:
        """Return the evaluations so far, including those of earlier sessions: step -> ``KEY/METRIC`` -> value."""
        files = evaluations(self.folder)
        return {
            step: evaluation_numbers(read_json(file, "evaluation", CheckpointError)) for step, file in files.items()
        }

    def track(self, row: dict[str, float]) -> None:
        """Send metrics that belong to no step to the trackers."""
        self._feeds.log(row)

    def check_folder(self) -> None:
        """Check that the folder still exists.

        Raises:
            CheckpointError: it was deleted, or replaced by another folder.
        """
        if self._lock:
            self._lock.check()

    def _prune_rollouts(self) -> None:
        if (keep := self.config.train.keep_rollouts) is not None:
            for old in sorted((self.folder / ROLLOUTS).glob("step-*.jsonl"))[:-keep]:
                old.unlink(missing_ok=True)
            for results in list(evaluations(self.folder).values())[:-keep]:
                for old in results.parent.glob("*.jsonl"):
                    old.unlink(missing_ok=True)

    def checkpoint(self, trainers: TrainerGroup, step: int, state: dict[str, Any]) -> None:
        """Start to save a checkpoint; see ``CheckpointKeeper.save``."""
        self.phase("checkpoint")
        self.check_folder()
        self._checkpoints.save(trainers, step, state)

    def rescue(self, trainers: TrainerGroup) -> None:
        """Wait until the checkpoint that is being written is complete, before the trainers are killed."""
        if self._checkpoints.is_saving:
            self.phase("finishing the checkpoint")
            if problem := self._checkpoints.rescue(trainers):
                self.screen.say(problem)

    def finish(self, trainers: TrainerGroup) -> dict[str, Any]:
        """Write the adapter, the summary and the plot; return the summary."""
        from megarl.controller.recording.plot import plot_run

        self._checkpoints.finish(trainers)
        self.check_folder()
        trainers.call("save_adapter", str(self.folder / ADAPTER))
        device = sum(trainers.call("peak_device_gib"))
        self._say_coverage(trainers)
        summary = summarise(self.rows) | {
            "seconds": time.perf_counter() - self._started,
            "start_seconds": self.screen.start.seconds if self.screen.start else None,
            "peak_memory_gib": self.memory.stop(),
            "peak_device_memory_gib": device,
            "checkpoint_stop_seconds": self._checkpoints.stop_seconds,
            "first_sync_seconds": {report.kind: sum(report.seconds.values()) for report in self.syncs},
        }
        evaluated = self.evaluated()
        if evaluated:
            first, last = min(evaluated), max(evaluated)
            summary |= {"eval_after": evaluated[last]} | ({"eval_before": evaluated[0]} if first == 0 else {})
        if self._dropped is not None:
            summary["dropped_prompts"] = self._dropped
        with writing(self.folder / SUMMARY):
            write_text(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        with writing(self.folder / PLOT):
            plot_run(self.rows, self.folder / PLOT, evaluated)
        self.phase("trackers")
        self._feeds.finish(summary)
        self.close()
        return summary

    def _say_coverage(self, trainers: TrainerGroup) -> None:
        """Say if matrices of the adapter had no gradient in the last step that had one, and name the first of them."""
        counts = coverage(self.rows)
        if counts and counts["grad_tensors"] < counts["adapter_tensors"]:
            names = trainers.call("without_gradient")[0]
            if not names:  # of rows before a resume
                return
            self.screen.say(
                f"{counts['adapter_tensors'] - counts['grad_tensors']:.0f} of the adapter's "
                f"{counts['adapter_tensors']:.0f} matrices had no gradient in the last step:\n{first_few(names)}",
                style="bold yellow",
            )

    def close(self) -> None:
        """Close the trackers, stop the threads and unlock the folder. Safe to call twice."""
        self.memory.stop()
        self._feeds.finish(None)
        if self._lock:
            self._lock.release()
