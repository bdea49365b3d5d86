# SPDX-License-Identifier: Apache-2.0
"""Break one run, let it go on, and compare it with one that nothing happened to."""

import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from megarl.checkpoint_engine.transports.shm_folders import ROOT
from megarl.errors import CheckpointError
from megarl.model.checkpoint.digests import verify
from megarl.run_folder import checkpoints
from tests.faults.cases import HANG_SECONDS, PHASES, Case
from tests.faults.spoil import FILL, LOSS, REWARD, SMALL_SHM, mount, unmount
from tests.helpers.processes import describe, find_engine, is_alive
from tests.helpers.train_run import TrainRun, make_recipe, read_rollout, read_rows

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "told to end": signal.SIGTERM}
STEPS, PROMPTS, HIT_AFTER = 8, 2, 2
SETTINGS = (
    f"train.steps={STEPS}",
    f"train.prompts_per_step={PROMPTS}",
    "train.save_every=2",
    "train.eval_every=null",
    "eval.tasks=[]",
    "task.held_out=0",
    f"train.hang_seconds={HANG_SECONDS}",
    "sampler.max_response_tokens=90",
)
# Longest time from a fault to the next step or the end of the run, beyond the configured time without a sign of life:
# starting vLLM or the ranks again takes 20 to 40 s on two busy cores.
LIMIT = 60.0


class Row(NamedTuple):
    """The course of a run after its fault.

    Attributes:
        case: name.
        seconds: from the fault to the next step, or to the end of the run.
        restarts: of engines and trainers, as counted in the metrics.
        result: what was compared.
        problem: what should not have been; empty if the row is good.
        said: the line that told of the fault.
    """

    case: str
    seconds: float
    restarts: str
    result: str
    problem: str
    said: str


class Bench:
    """A recipe, and the run that nothing happens to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = make_recipe(folder, "qwen3", tied=True)
        (folder / "reward.py").write_text(REWARD)
        (folder / "loss.py").write_text(LOSS)
        self._reference: Path | None = None

    def reference(self) -> Path:
        """Return the folder of the run that nothing happened to."""
        if self._reference is None:
            run = self._start(self.folder / "reference")
            try:
                run.wait_for(f"step {STEPS} ", 240)
                assert run.finish(60) == 0, run.output()
                self._reference = run.folder()
            finally:
                run.kill()
        return self._reference

    def run(self, case: Case) -> Row:
        """Break a run, and judge what it became."""
        reference = self.reference()
        place = Path(tempfile.mkdtemp(dir=self.folder))
        seconds, counts, problem = 0.0, [0.0, 0.0], ""
        self._before: set[psutil.Process] = set()
        run = self._start(place, *case.settings, spoiled=case.who)
        try:
            if case.phase != "building":
                run.wait_for(f"step {HIT_AFTER} ", 240)
            seconds = self._await(case, run, place, self._hit(case, run, place))
            if run.process.poll() is not None and case.result != "ended":
                run = self._resume(run, place)
            if case.result != "ended":
                run.wait_for(f"step {STEPS} ", 240)
                assert run.finish(60) == 0, run.output()
                [folder] = place.glob("arithmetic-*")
                counts = [sum(row[f"{who}_restarts"] for row in read_rows(folder)) for who in ("engine", "trainer")]
                exact = case.result == "bit for bit"
                problem = compare(folder, reference, exact=exact) or self._count(case, *counts)
            limit = LIMIT * (1 + (case.phase == "building"))  # the rest of the start too
            if seconds > limit + (HANG_SECONDS if case.how in ("stopped", "never ends") else 0):
                problem = problem or f"nothing for {seconds:.0f} s"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[-1500:]}"
        finally:
            run.kill()
            self._mend()
        if not problem and (left := leftovers(self._before | run.family)):
            problem = f"left: {', '.join(sorted(left))}"
        said = next((line for line in self._said if (case.ends or "is lost ") in line), "")
        unmount(place)
        shutil.rmtree(place, ignore_errors=True)
        restarts = ", ".join(f"{count:.0f}" for count in counts)
        return Row(case.name, seconds, restarts, case.result, problem, said)

    def _start(self, place: Path, *settings: str, spoiled: str = "") -> TrainRun:
        place.mkdir(exist_ok=True)
        self._said: list[str] = []
        if spoiled == "disk":
            mount(place)
        before = SMALL_SHM if spoiled == "shm" else ()
        return TrainRun(self.recipe, f"train.output={place}", *SETTINGS, *settings, before=before)

    def _hit(self, case: Case, run: TrainRun, place: Path) -> float:
        """Do what the case says; return when."""
        if case.how == "never ends":
            (self.folder / "spoil-loss-endless").touch()
        elif case.who in ("reward", "loss"):
            (self.folder / f"spoil-{case.who}").touch()
        elif case.who == "disk":
            subprocess.run([*FILL, str(place)], check=True)
        elif case.who == "shm":
            subprocess.run(["nsenter", "-t", str(run.process.pid), "-m", *FILL, str(ROOT)], check=True)
        else:
            victim = psutil.Process(run.process.pid)
            if case.who in ("engine", "front end"):
                victim = run.find("ray::SamplerEngine")
                victim = await_engine(victim) if case.who == "engine" else victim
            if not (case.who == "engine" and case.phase == "building"):  # it starts side by side with the ranks
                rank = run.find_rank(PHASES[case.phase])
                victim = rank if case.who == "rank" else victim
            victim.send_signal(SIGNALS[case.how])
            if case.who == "controller" and case.how == "stopped":
                time.sleep(HANG_SECONDS + 4)
                victim.resume()
        return time.monotonic()

    def _await(self, case: Case, run: TrainRun, place: Path, hit: float) -> float:
        """Wait until the run ends, or has done the step after the fault; return the seconds since ``hit``."""
        done = steps_said(run)
        while time.monotonic() - hit < 2 * LIMIT:
            if case.ends or (case.who == "controller" and case.how == "killed"):
                if run.process.poll() is not None:
                    status = run.finish(30)
                    self._said = run.output().splitlines()
                    text = " ".join(self._said[-12:])
                    assert case.ends in text, f"not said: {case.ends!r}: {text}"
                    wanted = {"killed": -signal.SIGKILL, "told to end": 130}.get(case.how, 1)
                    assert status == wanted, status
                    check_checkpoints(next(place.glob("arithmetic-*")))
                    return time.monotonic() - hit
            elif len(steps_said(run)) > len(done) + 1:
                self._said = run.output().splitlines()
                return time.monotonic() - hit
            run.look()
            time.sleep(0.1)
        raise AssertionError(f"neither a step nor an end within {2 * LIMIT:.0f} s: {run.output()[-2000:]}")

    def _resume(self, run: TrainRun, place: Path) -> TrainRun:
        """Mend what was spoiled, and continue the run with one command."""
        self._mend()
        (place / "filler").unlink(missing_ok=True)
        run.kill()
        self._before = run.family
        [folder] = place.glob("arithmetic-*")
        return TrainRun(folder, command="resume")

    def _mend(self) -> None:
        """Remove what spoils rewards and losses."""
        for file in self.folder.glob("spoil-*"):
            file.unlink()

    def _count(self, case: Case, engines: float, trainers: float) -> str:
        wanted = {"engine": (1, 0), "front end": (1, 0), "rank": (0, 1), "loss": (0, 1)}
        wanted = wanted.get("" if case.ends else case.who, (0, 0))
        return "" if (engines, trainers) == wanted else f"{engines:.0f} engine and {trainers:.0f} trainer restarts"


def compare(folder: Path, reference: Path, *, exact: bool) -> str:
    """Return what is wrong with a complete run, or nothing.

    Args:
        folder: of the run.
        reference: of one that nothing happened to.
        exact: True if both must be the same bit for bit; else every prompt must have been trained on once.
    """
    check_checkpoints(folder)
    rows = read_rows(folder)
    if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        return f"rows of steps {[row['step'] for row in rows]}"
    if (drawn := prompts(folder)) != (wanted := prompts(reference)):
        return f"prompts {drawn}, not {wanted}"
    if not exact:
        return ""
    for step in range(1, STEPS + 1):
        for a, b in zip(read_rollout(reference, step), read_rollout(folder, step), strict=True):
            if any(a[key] != b[key] for key in ("prompt_ids", "response_ids", "reward", "advantage")):
                return f"other completions at step {step}"
    last = f"checkpoints/step-{STEPS:06d}"
    for name in ("optimizer.safetensors", "rng.safetensors", "adapter/adapter_model.safetensors"):
        tensors, others = load_file(reference / last / name), load_file(folder / last / name)
        if tensors.keys() != others.keys() or any(not torch.equal(tensors[key], others[key]) for key in tensors):
            return f"another {name}"
    return ""


def prompts(folder: Path) -> list[str]:
    """Return the ids of the prompts of all completions that a run was trained on."""
    return sorted(one["prompt"] for step in range(1, STEPS + 1) for one in read_rollout(folder, step))


def steps_said(run: TrainRun) -> list[str]:
    """Return the lines that tell of a complete step."""
    return [line for line in run.output().splitlines() if line.startswith("step ")]


def check_checkpoints(folder: Path) -> None:
    """Compare every checkpoint that counts with its digests."""
    for checkpoint in checkpoints(folder):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            raise AssertionError(f"torn: {error}") from error


def leftovers(family: set[psutil.Process]) -> set[str]:
    """Return what is left of a run: shared-memory folders and processes. Other runs may go on beside it.

    Args:
        family: all processes of the run.
    """
    numbers = {str(process.pid) for process in family}
    shared = {str(path) for path in ROOT.glob("*megarl*") if numbers & set(path.name.split("-"))}
    living = [process for process in family if is_alive(process)]
    return shared | {describe(process)[:60] for process in living}


def await_engine(front_end: psutil.Process) -> psutil.Process:
    """Return the engine process of a sampler's process, once it is there."""
    deadline = time.monotonic() + 60
    while True:
        with suppress(ValueError):
            return find_engine(front_end)
        assert time.monotonic() < deadline, "no engine process"
        time.sleep(0.1)
