# SPDX-License-Identifier: Apache-2.0
"""Start runs over two machines, break them, let them go on, and compare them with one that nothing happened to."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from megarl.run_folder import SUMMARY
from tests.faults.run import SETTINGS, check_checkpoints, compare
from tests.helpers.train_run import ROOT, make_recipe, read_rows
from tests.nodes.cases import Case
from tests.nodes.machines import Machine

# The launchers and the batch script are given up on after this time; the longest silence that is allowed.
LIMIT, SILENCE = 400.0, 60.0
# The checkpoint of the step before is complete by then.
HIT_AFTER = 3
LAYOUT = ("parallel.data=1", "parallel.tensor=2", "sampler.max_response_tokens=48")
# What a site would say in MEGARL_SETUP; here also what differs between the machines.
SETUP = """
case $(hostname) in
  node-a) export NODE_CPUS=$CPUS_A TMPDIR=/tmp ;;
  node-b) export NODE_CPUS=$CPUS_B TMPDIR=/tmp/elsewhere RAY_TMPDIR=/tmp/elsewhere/ray; mkdir -p $RAY_TMPDIR ;;
esac
export GLOO_SOCKET_IFNAME=eth0
"""
STAND_INS = {
    "scontrol": """#!/bin/bash
[ "$1" = requeue ] && echo "scontrol $*"
[ "$1" = show ] && echo "$HEAD_IS" && echo node-b
exit 0
""",
    # Runs the command on both nodes; ends the other one if one fails.
    "srun": """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=0 "$@" & pids[0]=$!
SLURM_NODEID=1 $ON_NODE_B bash -c 'cd "$0" && exec "$@"' "$PWD" "$@" & pids[1]=$!
wait -n "${pids[@]}"
for node in 0 1; do
  if ! kill -0 ${pids[node]} 2>/dev/null; then
    wait ${pids[node]} || { echo "srun: node $node failed"; kill -TERM ${pids[1 - node]} 2>/dev/null; }
  fi
done
wait ${pids[0]}; first=$?
wait ${pids[1]}; second=$?
exit $((first > second ? first : second))
""",
}


class Row(NamedTuple):
    """The course of a run.

    Attributes:
        case: name.
        seconds: from the fault to the next step, or to the end of the run.
        silence: longest time meanwhile without a word, seconds.
        restarts: of engines and trainers.
        problem: what should not have been; empty if the row is good.
        said: the line that told what was waited for, or why the run ended.
    """

    case: str
    seconds: float
    silence: float
    restarts: str
    problem: str
    said: str


class Bench:
    """A recipe, two machines, and the run that nothing happened to."""

    def __init__(self, folder: Path, machines: tuple[Machine, Machine]) -> None:
        self.folder, self.machines = folder, machines
        self.recipe = make_recipe(folder, "qwen3", tied=True)
        (folder / "setup.sh").write_text(SETUP)
        (folder / "bin").mkdir()
        for name, text in STAND_INS.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self._reference: Path | None = None
        self._token = secrets.token_hex(32)

    def run(self, case: Case) -> Row:
        """Do one case, and judge it."""
        place = self.folder / f"case-{time.monotonic_ns()}"
        place.mkdir()
        log, problem, counts = place / "log.txt", "", (0, 0)
        watch = Stopwatch(log)
        try:
            if case.fault != "none" and self._reference is None:
                self._reference = self._whole_run()
            started = self._start(case, place, log)
            self._course(case, started, log, watch)
            if case.ends:
                self._judge_end(case, started, log, watch)
                started = self._continue(case, place, log)
            if started:
                wait_until(lambda: all(one.poll() is not None for one in started), LIMIT, log)
                statuses = [one.returncode for one in started]
                assert not any(statuses), f"ended with {statuses}: {log.read_text()[-1500:]}"
                [folder] = place.glob("arithmetic-*")
                assert (folder / SUMMARY).exists()
                rows = read_rows(folder)
                counts = tuple(int(sum(row[f"{who}_restarts"] for row in rows)) for who in ("engine", "trainer"))
                if self._reference is None:
                    self._reference = folder.rename(self.folder / "reference")
                else:
                    problem = compare(folder, self._reference, exact=True)
            if not problem and counts != case.restarts:
                problem = f"{counts} restarts, not {case.restarts}"
            problem = problem or next(filter(None, (one.left(20) for one in self.machines)), "")
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[-1500:]}"
        if not problem and watch.silence > SILENCE:
            problem = f"no word for {watch.silence:.0f} s"
        for one in self.machines:
            one.fail()
            one.boot()
        lines = log.read_text().splitlines() if log.exists() else []
        said = next((line for line in lines if (case.ends or "is lost") in line), "")
        if problem:
            shutil.copy(log, self.folder.parent / f"nodes-{case.name.replace(' ', '-').replace(':', '')}.log")
        shutil.rmtree(place)
        return Row(case.name, watch.seconds, watch.silence, f"{counts[0]}, {counts[1]}", problem, said)

    def _whole_run(self) -> Path:
        row = self.run(Case("reference"))
        assert not row.problem and self._reference, row.problem
        return self._reference

    def _start(self, case: Case, place: Path, log: Path, *, again: bool = False) -> list[subprocess.Popen[bytes]]:
        """Start the launchers of both nodes, or the batch script."""
        settings = [f"train.output={place}", *SETTINGS, *LAYOUT, *case.settings]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NODE_", "SLURM_"))}
        environment = kept | {
            "MEGARL_PYTHON": sys.executable,
            "MEGARL_SETUP": str(self.folder / "setup.sh"),
            "CPUS_A": str(case.cpus[0]),
            "CPUS_B": str(case.cpus[1]),
            "RAY_AUTH_TOKEN": self._token,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "MEGARL_ROOT": str(ROOT),
        }
        here, there = self.machines
        if case.slurm:
            environment |= {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node-[a-b]",
                "SLURM_RESTART_COUNT": str(int(again)),
                "HEAD_IS": here.address,
                "ON_NODE_B": " ".join(there.prefix),
            }
            command = ["bash", str(ROOT / "scripts/slurm.sbatch"), str(self.recipe), *settings]
            return [here.start(command, environment, log)]
        settings += ["train.resume=auto"] if again else []
        self._command = ["bash", str(ROOT / "scripts/launch_node.sh"), str(self.recipe), *settings]
        environment |= {"NNODES": "2", "HEAD_ADDR": here.address}
        self._environment = environment
        return [self._launch(rank, log) for rank in (0, 1)]

    def _launch(self, rank: int, log: Path) -> subprocess.Popen[bytes]:
        return self.machines[rank].start(self._command, self._environment | {"NODE_RANK": str(rank)}, log)

    def _course(self, case: Case, started: list, log: Path, watch: "Stopwatch") -> None:
        """Do what the case says, and wait until the run has gone on or has ended."""
        if case.fault == "none":
            return
        alive = lambda: all(one.poll() is None for one in started)  # noqa: E731
        wait_until(lambda: f"\nstep {HIT_AFTER} " in log.read_text() or not alive(), LIMIT, log)
        assert alive(), log.read_text()[-1500:]
        victim, steps = self.machines[case.node], steps_said(log)
        watch.begin()
        if case.fault == "term":
            started[0].send_signal(signal.SIGTERM)
        elif case.fault == "lost":
            victim.fail()
            if case.back and not case.ends:
                time.sleep(8)
                victim.boot()
                started[case.node] = self._launch(case.node, log)
        elif case.fault == "cut":
            victim.cut()
            time.sleep(12)
            victim.mend()
        else:
            next(one for one in victim.processes() if "raylet/raylet" in " ".join(one.cmdline())).kill()
        if not case.ends:
            watch.wait(lambda: steps_said(log) > steps + 1 or started[0].poll() is not None, LIMIT)

    def _judge_end(self, case: Case, started: list, log: Path, watch: "Stopwatch") -> None:
        """Wait for the end that the case asks for; nothing may be left."""
        if case.fault == "none":
            watch.begin()
        waited = started[1] if case.node == 0 and not case.slurm else started[0]
        watch.wait(lambda: waited.poll() is not None and case.ends in log.read_text(), LIMIT)
        text = log.read_text()
        assert case.ends in text, f"not said: {case.ends!r}: {text[-1500:]}"
        assert waited.returncode, "its exit status is 0"
        for one in self.machines:
            assert not (left := one.left(20)), left

    def _continue(self, case: Case, place: Path, log: Path) -> list[subprocess.Popen[bytes]]:
        """Start a run that ended again, once its nodes are there; one that was refused is over."""
        folders = list(place.glob("arithmetic-*"))
        if case.fault == "none":
            return []
        check_checkpoints(folders[0])
        self.machines[case.node].boot()
        return self._start(case, place, log, again=True)


class Stopwatch:
    """Measures the time from a fault on, and the longest time without a new word in the log."""

    def __init__(self, log: Path) -> None:
        self._log, self.seconds, self.silence = log, 0.0, 0.0

    def begin(self) -> None:
        """Start."""
        self._began = self._heard = time.monotonic()
        self._size = self._log.stat().st_size

    def wait(self, done, seconds: float) -> None:
        """Wait until something is so."""

        def look() -> bool:
            now = time.monotonic()
            if (size := self._log.stat().st_size) != self._size:
                self._size, self._heard = size, now
            self.silence = max(self.silence, now - self._heard)
            self.seconds = now - self._began
            return done()

        wait_until(look, seconds, self._log)


def wait_until(done, seconds: float, log: Path) -> None:
    """Wait until something is so; fail with the log's end if it takes too long."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"nothing within {seconds:.0f} s: {log.read_text()[-1500:]}"
        time.sleep(0.2)


def steps_said(log: Path) -> int:
    """Return how many steps the log tells of."""
    return sum(line.startswith("step ") for line in log.read_text().splitlines())
