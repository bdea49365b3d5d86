# SPDX-License-Identifier: Apache-2.0
"""Run one node of a multi-node run. ``scripts/launch_node.sh`` calls this on every node with the same arguments.

Rank 0 starts Ray's head, waits until all nodes have joined, runs the job with RAY_ADDRESS set, and stores its exit
status in the cluster. The other nodes join, and leave when they read that status or lose the head. In every case all
processes that this launcher started are ended, and no others.

``ray symmetric-run`` (Ray 2.60) cannot be used. It ends with a plain ``ray stop``, which ends every Ray process of the
host; it refuses a host on which another Ray runs; and it does not handle signals, so a job could not save its
checkpoint first.
"""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.errors import ConfigError, MegarlError, WorkerError
from megarl.launch import processes
from megarl.launch.nodes.cluster import Cluster, HeadUnreachableError, answers, require_token
from megarl.launch.nodes.settings import NodeSettings, read_settings

POLL_SECONDS = 1.0
# Seconds without an answer after which the head counts as gone. Ray itself would wait for a minute.
HEAD_SECONDS = 15.0
# Seconds that Ray may take to end after SIGTERM, and the workers to leave.
RAY_GRACE = 10.0
LEAVE_SECONDS = 15.0
# How often a worker whose Ray has ended joins again.
MOST_JOINS = 4


class RayEndedError(WorkerError):
    """Ray has ended on this node."""


class Node:
    """This node's Ray; on the head also the job."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.environment = ray_environment()
        self.ray: subprocess.Popen[bytes] | None = None
        self.log = processes.Log()

    def run(self) -> int:
        """Run this node until the job ends. Returns the job's exit status, on workers too.

        Raises:
            WorkerError: Ray did not start, nodes are missing, or the head is gone.
        """
        return self._run_head() if self.settings.rank == 0 else self._run_worker()

    def close(self) -> None:
        """End everything that this node started."""
        if self.ray is not None:
            processes.stop(self.ray, signal.SIGTERM, RAY_GRACE)
        processes.end_descendants()

    def _run_head(self) -> int:
        self._tell_pid()
        self._start_ray("--head", f"--port={self.settings.port}", f"--node-ip-address={self.settings.host_ip}")
        self._wait_for_head()
        cluster = Cluster(self.settings.address)
        status = 1
        try:
            self._wait_for_nodes(cluster)
            status = self._run_job()
        except processes.Signalled as stopped:
            status = 128 + stopped.number
            raise
        finally:
            with processes.signals_ignored():
                self._dismiss(cluster, status)
        return status

    def _run_worker(self) -> int:
        for joins in range(1, MOST_JOINS + 1):
            self._wait_for_head()
            self.say(f"joining {self.settings.address}")
            self._start_ray(f"--address={self.settings.address}")
            cluster = Cluster(self.settings.address)
            try:
                return self._wait_for_end(cluster)
            except RayEndedError as error:
                # It crashed, or the head took the node for lost while the network was cut.
                if joins == MOST_JOINS or not answers(self.settings.head, self.settings.port):
                    raise
                first = str(error).partition("\n")[0].rstrip(":")
                self.say(f"{first}; joining again ({joins} of at most {MOST_JOINS - 1} times)")
                processes.end_descendants()
                self.ray, self.log = None, processes.Log()
            except processes.Signalled as stopped:
                self._leave_after_the_head(cluster, stopped)
                raise
        raise AssertionError("the last one returns or raises")

    def _leave_after_the_head(self, cluster: Cluster, stopped: processes.Signalled) -> None:
        """Wait for the head to end the job, but no longer than it may take.

        A scheduler signals all nodes at once. If a worker left at once, the job that is saving its checkpoint would
        lose ranks.
        """
        most = self.settings.job_grace + LEAVE_SECONDS
        self.say(f"{stopped}: waiting up to {most:.0f} s for the head to end the job (a second one leaves now)")
        with contextlib.suppress(WorkerError):
            self._wait_for_end(cluster, most)

    def _wait_for_end(self, cluster: Cluster, seconds: float = math.inf) -> int:
        """Wait for the job to end, and return its exit status.

        Raises:
            WorkerError: the head or this node's Ray is gone, or the job has not ended within ``seconds``.
        """
        heard = started = time.monotonic()
        while time.monotonic() - heard < HEAD_SECONDS and time.monotonic() - started < seconds:
            self._check_ray()
            try:
                status = cluster.job_status()
                heard = time.monotonic()
            except HeadUnreachableError:
                status = None
            if status is not None:
                self.say(f"the job has ended with exit status {status}")
                return status
            time.sleep(POLL_SECONDS)
        raise WorkerError(f"the head {self.settings.address} has not answered for {HEAD_SECONDS:.0f} s; leaving")

    def _start_ray(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
        command += ["--include-dashboard=false"] if self.settings.rank == 0 else []
        command += [] if self.settings.cpus is None else [f"--num-cpus={self.settings.cpus}"]
        command += [] if self.settings.gpus is None else [f"--num-gpus={self.settings.gpus}"]
        self.ray = processes.start(command, self.environment, self.log.file)

    def _tell_pid(self) -> None:
        """Write this process's id to MEGARL_PID_FILE, for a batch script that signals it to end the job."""
        if file := os.environ.get("MEGARL_PID_FILE"):
            Path(file).write_text(f"{os.getpid()}\n")

    def _check_ray(self) -> None:
        """Raise if this node's Ray has ended."""
        if self.ray is None or self.ray.poll() is None:
            return
        raise RayEndedError(f"Ray has ended on this node (exit status {self.ray.returncode}):\n{self.log.tail()}")

    def _wait_for_head(self) -> None:
        for waited in self._ticks():
            self._check_ray()
            if answers(self.settings.head, self.settings.port):
                return
            if waited and waited % 10 == 0:
                self.say(f"waiting for the head at {self.settings.address} ({self._progress(waited)})")
        raise WorkerError(
            f"no head answers at {self.settings.address} after {self.settings.join_timeout:.0f} s (JOIN_TIMEOUT); is "
            "the script running with NODE_RANK=0 there, and is the port open between the nodes?"
        )

    def _wait_for_nodes(self, cluster: Cluster) -> None:
        nodes: list[str] = []
        reported, silence = -1, ""
        for waited in self._ticks():
            self._check_ray()
            silence = ""
            try:
                nodes = cluster.alive_nodes()
            except HeadUnreachableError as error:
                silence = f" ({error})"
            if len(nodes) != reported or waited % 10 == 0:
                self.say(f"{len(nodes)} of {self.settings.nodes} nodes have joined ({self._progress(waited)})")
                reported = len(nodes)
            if reported >= self.settings.nodes:
                return
        raise WorkerError(
            f"only {reported} of {self.settings.nodes} nodes joined within {self.settings.join_timeout:.0f} s "
            f"(JOIN_TIMEOUT): {', '.join(nodes)}{silence}; is the script running with HEAD_ADDR={self.settings.head} "
            f"and HEAD_PORT={self.settings.port} on the others?"
        )

    def _run_job(self) -> int:
        command = list(self.settings.command)
        self.say(f"starting: {' '.join(command)}")
        job = processes.start(command, self.environment | {"RAY_ADDRESS": self.settings.address})
        try:
            while (status := job.poll()) is None:
                self._check_ray()
                time.sleep(POLL_SECONDS / 5)
        except processes.Signalled as stopped:
            self.say(f"{stopped}: stopping the job")
            with processes.signals_ignored():
                processes.stop(job, stopped.number, self.settings.job_grace)
            raise
        except WorkerError:
            processes.stop(job, signal.SIGTERM, self.settings.job_grace)
            raise
        return status if status >= 0 else 128 - status

    def _dismiss(self, cluster: Cluster, status: int) -> None:
        """Tell the workers that the job has ended, and wait a little for them to leave."""
        deadline = time.monotonic() + LEAVE_SECONDS
        announced = False
        while time.monotonic() < deadline:
            with contextlib.suppress(HeadUnreachableError):
                if not announced:
                    cluster.announce(status)
                    announced = True
                if len(cluster.alive_nodes()) <= 1:
                    return
            if self.ray is not None and self.ray.poll() is not None:
                break  # nobody will answer
            time.sleep(POLL_SECONDS / 5)
        if not announced:
            self.say("the workers could not be told that the job is over; they leave once the head does not answer")

    def _ticks(self) -> Iterator[int]:
        """Yield the whole seconds waited so far, about once a second, until JOIN_TIMEOUT."""
        start, second = time.monotonic(), 0
        while second <= self.settings.join_timeout:
            yield second
            time.sleep(POLL_SECONDS)
            second = round(time.monotonic() - start)

    def _progress(self, waited: int) -> str:
        return f"{waited} s of at most {self.settings.join_timeout:.0f}"

    def say(self, text: str) -> None:
        """Print to stderr. The job writes to stdout, whose last line is the run folder."""
        print(f"[node {self.settings.rank}] {text}", file=sys.stderr, flush=True)


def ray_environment() -> dict[str, str]:
    """Return the environment for Ray and the job: this process's, without the variable that names another cluster."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # On SIGTERM Ray would wait up to 30 s for running tasks, but the job has ended by then.
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    return environment


def allow_open_files(wanted: int = 65536) -> None:
    """Raise the soft limit of open files as far as the hard limit allows; Ray needs some per worker and peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def main(arguments: Sequence[str]) -> int:
    """Run the command line of ``scripts/launch_node.sh``, and return the exit status."""
    rank = os.environ.get("NODE_RANK", "?")
    node = None
    try:
        settings = read_settings(os.environ, arguments)
        require_token(settings.nodes)
        node = Node(settings)
        processes.adopt_orphans()
        allow_open_files()
        processes.raise_on_signals()
        return node.run()
    except MegarlError as error:
        print(f"[node {rank}] error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except processes.Signalled as stopped:
        return 128 + stopped.number
    finally:
        if node is not None:
            with processes.signals_ignored():
                node.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
