# SPDX-License-Identifier: Apache-2.0
"""Run slurm.sbatch and the program of launch_node.sh with real Ray: two nodes on this machine, each with one CPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.traced import ROOT, Traced

JOBS = Path(__file__).parent / "jobs"
MODULE = [sys.executable, "-m", "megarl.launch.nodes.node"]
# The same, with less patience: with a head that does not answer, and with a Ray that has lost its head.
HASTY = [
    *(sys.executable, "-c"),
    "import sys; from megarl.launch.nodes import node; node.HEAD_SECONDS = 5; node.RAY_GRACE = 2; "
    "raise SystemExit(node.main(sys.argv[1:]))",
]

Start = Callable[..., "Launched"]


class Launched:
    """A launcher and its output."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        name = f"node{environment['NODE_RANK']}"
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=err)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def wait_for(self, text: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.err.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.1)

    def wait_for_job(self, file: Path, seconds: float = 240) -> None:
        self.wait_for("starting: ", seconds)
        deadline = time.monotonic() + 60
        while not file.exists() or file.read_text() != "running":
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(traced: Traced, port: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    # Ray's socket paths are limited to 107 characters, so not below tmp_path.
    ray_folder = Path("/tmp") / f"mr{os.getpid()}"
    environment = traced.environment | {
        "NNODES": "2",
        "HEAD_ADDR": "127.0.0.1",
        "HEAD_PORT": str(port),
        "JOIN_TIMEOUT": "240",
        "NODE_CPUS": "1",
        "RAY_TMPDIR": str(ray_folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "NODES_ON_THIS_HOST": "1",
        # Without the real ~/.ray/auth_token.
        "HOME": str(tmp_path),
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    ray_folder.mkdir(exist_ok=True)

    def launch(rank: int, job: list[str], command: list[str] = MODULE, **changes: str) -> Launched:
        return Launched([*command, "--", *job], environment | {"NODE_RANK": str(rank)} | changes, tmp_path)

    yield launch
    subprocess.run(["rm", "-rf", str(ray_folder)], check=True)


def test_signals_end_only_the_signalled_node_and_ctrl_c_on_the_head_reaches_the_job(
    start: Start, traced: Traced, tmp_path: Path
) -> None:
    job = [sys.executable, str(JOBS / "wait_for_signal.py"), str(tmp_path / "signal")]
    worker, head = start(1, job), start(0, job)
    head.wait_for_job(tmp_path / "signal")
    of_worker, of_head = worker.below(), head.below()
    assert any("raylet" in process.name() for process in of_worker)

    # A worker waits for the head, which may be saving a checkpoint; at the second signal it leaves.
    worker.process.send_signal(signal.SIGTERM)
    worker.wait_for("SIGTERM: waiting up to 55 s for the head to end the job")
    time.sleep(2)
    assert worker.process.poll() is None
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 128 + signal.SIGTERM
    assert psutil.wait_procs(of_worker, timeout=3)[1] == []
    assert [process for process in of_head if not process.is_running()] == []
    assert head.process.poll() is None
    assert (tmp_path / "signal").read_text() == "running"

    head.process.send_signal(signal.SIGINT)
    assert head.wait(30) == 128 + signal.SIGINT
    assert (tmp_path / "signal").read_text() == "SIGINT"
    assert traced.wait_until_gone() == []


@pytest.mark.long
def test_a_signal_to_all_nodes_at_once_leaves_the_job_its_nodes_until_it_has_ended(
    start: Start, traced: Traced, tmp_path: Path
) -> None:
    # The job saves for longer than a launcher takes to leave.
    job = [sys.executable, str(JOBS / "wait_for_signal.py"), str(tmp_path / "signal"), "4"]
    worker, head = start(1, job), start(0, job)
    head.wait_for_job(tmp_path / "signal")
    of_worker = worker.below()
    for node in (worker, head):
        node.process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert (tmp_path / "signal").read_text() == "SIGTERM"
    assert [process for process in of_worker if not process.is_running()] == []
    assert head.wait(30) == worker.wait(30) == 128 + signal.SIGTERM
    assert "the job has ended with exit status 143" in worker.err.read_text()
    assert traced.wait_until_gone() == []


def test_worker_leaves_by_itself_when_the_head_is_killed(start: Start, traced: Traced, tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "wait_for_signal.py"), str(tmp_path / "signal")]
    worker, head = start(1, job, HASTY), start(0, job)
    head.wait_for_job(tmp_path / "signal")
    head.process.kill()
    assert worker.wait(40) == 1
    assert "[node 1] error: the head 127.0.0.1:" in worker.err.read_text()
    assert "has not answered for 5 s; leaving" in worker.err.read_text()
    # The killed launcher could clean nothing up; the kernel signalled its Ray and its job.
    assert (tmp_path / "signal").read_text() == "SIGTERM"
    assert traced.wait_until_gone(15) == []


def test_worker_gives_up_on_a_missing_head(start: Start, traced: Traced) -> None:
    worker = start(1, ["true"], JOIN_TIMEOUT="2")
    assert worker.wait(30) == 1
    assert "no head answers at 127.0.0.1:" in worker.err.read_text()
    assert traced.wait_until_gone() == []


@pytest.mark.long
def test_a_node_without_the_heads_token_is_told_what_to_do_and_the_head_gives_up_on_it(
    start: Start, traced: Traced
) -> None:
    head = start(0, ["true"], JOIN_TIMEOUT="12")
    worker = start(1, ["true"], RAY_AUTH_TOKEN="fedcba9876543210" * 4)
    assert worker.wait(120) == 1
    assert "give every node the head's ~/.ray/auth_token" in worker.err.read_text()
    assert head.wait(60) == 1
    assert "only 1 of 2 nodes joined within 12 s (JOIN_TIMEOUT)" in head.err.read_text()
    assert traced.wait_until_gone() == []


def test_several_nodes_without_a_token_are_refused_and_a_token_that_others_can_read_is_hidden(
    start: Start, tmp_path: Path
) -> None:
    for rank in (0, 1):
        node = start(rank, ["true"], RAY_AUTH_TOKEN="")
        assert node.wait(120) == 2
        assert "there is no Ray token" in node.err.read_text() and "RAY_AUTH_MODE=disabled" in node.err.read_text()
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o644)
    worker = start(1, ["true"], RAY_AUTH_TOKEN="", JOIN_TIMEOUT="1")
    assert worker.wait(60) == 1 and "no head answers" in worker.err.read_text()
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def sbatch(start: Start, traced: Traced, tmp_path: Path) -> Callable[..., Launched]:
    """Run the batch script as Slurm does."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    # Slurm runs a copy from its spool folder, in the folder of submission.
    spooled = tmp_path / "slurm_script"
    spooled.write_text((ROOT / "scripts/slurm.sbatch").read_text())
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "both[1-2]"}
    slurm |= {"SLURM_JOB_ID": "4711", "HEAD_ADDR": "overwritten", "TMPDIR": str(tmp_path), "RAY_AUTH_TOKEN": ""}

    def submit(job: list[str], **changes: str) -> Launched:
        path = f"{stand_ins}:{traced.environment['PATH']}"
        return start(0, job, ["bash", str(spooled)], **slurm, **changes, PATH=path)

    return submit


def test_sbatch_runs_the_script_on_every_host_under_a_token_and_its_status_is_everyones(
    sbatch: Callable[..., Launched], traced: Traced
) -> None:
    batch = sbatch(["python", str(JOBS / "every_node.py"), "3", "train.steps=1", "a=b c"])
    assert batch.wait(300) == 3, batch.err.read_text()
    assert "nodes=2 pinned=True arguments=['train.steps=1', 'a=b c']\n" in batch.out.read_text()
    assert "srun: the nodes ended with 3 and 3\n" in batch.out.read_text()
    assert "--ntasks-per-node=1" in batch.out.read_text()
    assert "requeue" not in batch.out.read_text()
    assert traced.wait_until_gone() == []


@pytest.mark.long
def test_sbatch_passes_the_signal_before_the_time_limit_to_the_job_and_queues_it_again(
    sbatch: Callable[..., Launched], traced: Traced, tmp_path: Path
) -> None:
    batch = sbatch([sys.executable, str(JOBS / "wait_for_signal.py"), str(tmp_path / "signal"), "3"])
    batch.wait_for_job(tmp_path / "signal")
    batch.process.send_signal(signal.SIGTERM)
    assert batch.wait(60) == 128 + signal.SIGTERM, batch.err.read_text()
    assert (tmp_path / "signal").read_text() == "SIGTERM"
    assert batch.out.read_text().splitlines()[-1] == "scontrol requeue 4711"
    assert "[node 1] the job has ended with exit status 143" in batch.err.read_text()
    assert traced.wait_until_gone() == []


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["r.yaml", "lora.r=4"], "r.yaml train.resume=auto lora.r=4"),
        (["--", "true"], "-- true"),
    ],
)
def test_a_job_that_is_queued_again_resumes(tmp_path: Path, traced: Traced, arguments: list[str], passed: str) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho one\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = traced.environment | {"PATH": f"{tmp_path}:{traced.environment['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "one", "SLURM_SUBMIT_DIR": str(ROOT)}
    for count, expected in (("0", " ".join(arguments)), ("1", passed)):
        done = subprocess.run(
            ["bash", str(ROOT / "scripts/slurm.sbatch"), *arguments],
            env=environment | {"SLURM_RESTART_COUNT": count},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith(f"launch_node {expected}")


def test_sbatch_has_a_place_for_modules_variables_and_a_container(tmp_path: Path, traced: Traced) -> None:
    programs = {
        "scontrol": "echo one; echo two",
        "srun": 'for each in "$@"; do echo "srun: $each"; done; while [[ $1 == -* ]]; do shift; done; '
        'SLURM_NODEID=1 "$@"',
        "apptainer": 'echo "in a container: $1 $2 $3, rank $NODE_RANK of $NNODES, grace $JOB_GRACE"; '
        '[ ${#RAY_AUTH_TOKEN} = 64 ] || exit 9; shift 3; exec "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    # A site's file may use variables that are not set.
    (tmp_path / "site.sh").write_text('module() { echo "module $*"; }\nmodule load cuda $NO_SUCH\nexport NODE_RANK=7\n')
    environment = traced.environment | {"PATH": f"{tmp_path}:{traced.environment['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "both", "SLURM_SUBMIT_DIR": str(ROOT)}
    environment |= {"MEGARL_CONTAINER": "apptainer exec --nv image.sif", "MEGARL_SETUP": str(tmp_path / "site.sh")}
    environment |= {"MEGARL_SRUN": "--container-image=image --container-mounts=/data", "RAY_AUTH_TOKEN": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/slurm.sbatch"), "r.yaml"], env=environment, capture_output=True, text=True
    )
    assert "srun: --container-image=image\nsrun: --container-mounts=/data\n" in done.stdout, done.stderr
    assert "in a container: exec --nv image.sif, rank 1 of 2, grace 90\nmodule load cuda\n" in done.stdout
    # The launcher has read the site's file: it refuses the rank that is set there.
    assert done.returncode == 2 and "NODE_RANK is '7'; it must be an integer from 0 to 1" in done.stderr


# What the sbatch file asks of Slurm, done on one machine: the command once for each node id, the highest exit status.
STAND_INS = {
    "scontrol": """#!/bin/bash
[ "$1" = requeue ] && echo "scontrol $*"
[ "$*" = "show hostnames both[1-2]" ] && echo 127.0.0.1 && sleep 0.3 && echo localhost
exit 0
""",
    "srun": """#!/bin/bash
while [[ $1 == -* ]]; do echo "srun $1"; shift; done
export -n NODE_RANK; unset NODE_RANK
SLURM_NODEID=1 "$@" & other=$!
SLURM_NODEID=0 "$@"; first=$?
wait $other; second=$?
echo "srun: the nodes ended with $first and $second"
exit $((first > second ? first : second))
""",
}
