# SPDX-License-Identifier: Apache-2.0
"""Detect dead or stopped processes: every actor gives signs of life from a thread, and the controller watches for them.

A process that is stopped (SIGSTOP, a frozen container), or whose interpreter hangs, gives no sign. Neither does an
actor while one of its children, such as vLLM's engine process, is stopped. The signs travel through the key-value store
of Ray's head (``ray.experimental.internal_kv``; checked with Ray 2.60), so that no actor has to answer a call.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl import progress
from megarl.controller.actors.logs import log_file, redirect_output
from megarl.errors import LostError, WorkerError
from megarl.network import ADDRESS

NAMESPACE = b"megarl-pulse"
BEAT_SECONDS = 1.0
# Children come and go rarely, and finding them means reading all of /proc.
BEATS_PER_SEARCH = 10
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# Seconds to wait for the processes that are killed, and for actors that Ray was told to kill.
KILL_SECONDS, LEAVE_SECONDS = 5.0, 3.0


@dataclass(frozen=True)
class Participant:
    """An actor that is watched, as the actor itself is told of it.

    Attributes:
        key: under which its signs are kept.
        name: its name, for messages.
        index: its index among the actors of its kind.
        log: the file of its output.
    """

    key: str
    name: str
    index: int
    log: Path

    def join(self) -> int:
        """Send this process's output to the log and start to give signs of life. An actor calls this first.

        Returns:
            The size of the log before.
        """
        size = redirect_output(self.log)
        os.environ.setdefault(ADDRESS, ray.util.get_node_ip_address())
        node = ray.get_runtime_context().get_node_id()
        threading.Thread(target=_beat, args=(self.key, node), daemon=True).start()
        return size


def _beat(key: str, node: str) -> None:
    process, children = psutil.Process(), []
    count = 0
    while True:
        if count % BEATS_PER_SEARCH == 0:
            children = process.children(recursive=True)
        sign = {
            "count": count,
            "progress": progress.count(),
            "host": socket.gethostname(),
            "node": node,
            "process": [process.pid, process.create_time()],
            "children": [[child.pid, child.create_time()] for child in children],
            "stopped": [_described(child) for child in children if _is_stopped(child)],
        }
        # If the head is gone, the cluster ends anyway and the controller reports it.
        with contextlib.suppress(Exception):
            internal_kv._internal_kv_put(key, json.dumps(sign), namespace=NAMESPACE)
        count += 1
        time.sleep(BEAT_SECONDS)


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() in STOPPED
    return False


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({process.name()})"
    return str(process.pid)


@dataclass
class _Seen:
    """The newest sign of one participant.

    Attributes:
        at: when it arrived, monotonic seconds.
        moved: when the first one with its progress arrived.
        sign: as ``_beat`` gave it.
    """

    at: float
    moved: float
    sign: dict[str, Any]


class Watch:
    """Watches for the signs of life of all participants; runs in the controller.

    Attributes:
        run: prefix of the keys that hold the signs.
        logs: folder of the actors' logs.
    """

    def __init__(self, names: Sequence[str], logs: Path, hang_seconds: float) -> None:
        """Start to watch. A participant is watched from its first sign on; before that, the limit on building applies.

        Args:
            names: names of all participants.
            logs: folder of the actors' logs.
            hang_seconds: ``train.hang_seconds``.
        """
        self.run, self.logs, self._limit = f"{os.getpid()}-{time.time_ns()}", logs, hang_seconds
        self._names, self._node = tuple(names), ray.get_runtime_context().get_node_id()
        self._seen: dict[str, _Seen] = {}
        self._keys = {name: f"{self.run}/{name}" for name in names}
        self._looked = time.monotonic()
        self._end = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def participant(self, name: str, index: int) -> Participant:
        """Return the participant ``name``, for its actor."""
        return Participant(self._keys[name], name, index, log_file(self.logs, name))

    def end(self, *names: str) -> None:
        """Kill the processes of participants with SIGKILL. What has their names next are others."""
        for name in names:
            self._keys[name] = f"{self.run}/{time.time_ns()}/{name}"
        self._kill([seen for name in names if (seen := self._seen.pop(name, None))])

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise ``LostError`` if a participant has given no sign of life for ``train.hang_seconds``.

        Args:
            names: participants to check; default: all.

        Raises:
            WorkerError: see ``check_head``.
        """
        self.check_head()
        for name in self._names if names is None else names:
            if self.silence(name) > self._limit:
                raise LostError.of(
                    [name],
                    f"{name} has given no sign of life for {self.silence(name):.0f} s (train.hang_seconds is "
                    f"{self._limit:g}): {self._why(self._seen[name].sign)}{self.log_note(name)}",
                )

    def check_progress(self, names: Sequence[str], since: float) -> None:
        """Raise ``LostError`` if none of some participants has got on for ``train.hang_seconds``.

        One that waits for another gets nothing done either, so all of them are lost together.

        Args:
            names: participants that work together.
            since: when their work began, monotonic seconds.
        """
        moved = max([since, *(seen.moved for name in names if (seen := self._seen.get(name)))])
        if (idle := self._looked - moved) > self._limit:
            raise LostError.of(
                names,
                f"no trainer rank has got on with the update for {idle:.0f} s (train.hang_seconds is {self._limit:g}): "
                f"one of them computes endlessly, or they wait for each other{self.log_note(names[0])}",
            )

    def silence(self, name: str) -> float:
        """Return the seconds since a participant's last sign of life; 0 before the first one."""
        seen = self._seen.get(name)
        return self._looked - seen.at if seen is not None else 0.0

    def check_head(self) -> None:
        """Raise ``WorkerError`` if the head of the Ray cluster has not answered for ``train.hang_seconds``."""
        if self._head_silence() > self._limit:
            time.sleep(3 * BEAT_SECONDS)  # in case this process itself was stopped until a moment ago
            if (silence := self._head_silence()) > self._limit:
                raise WorkerError(
                    f"the head of the Ray cluster has not answered for {silence:.0f} s (train.hang_seconds is "
                    f"{self._limit:g})"
                )

    def _head_silence(self) -> float:
        return time.monotonic() - self._looked

    def _why(self, sign: dict[str, Any]) -> str:
        if sign["stopped"]:
            return f"its process {', '.join(sign['stopped'])} on {sign['host']} is stopped"
        pid = sign["process"][0]
        with contextlib.suppress(psutil.Error):
            if sign["node"] == self._node and psutil.Process(pid).status() in STOPPED:
                return f"its process {pid} on {sign['host']} is stopped"
        return f"its process {pid} on {sign['host']} is stopped, hangs or is cut off"

    def log_note(self, name: str) -> str:
        """Return the end of an error message about a participant: the path of its log, if there is one."""
        file, seen = log_file(self.logs, name), self._seen.get(name)
        remote = f" on {seen.sign['host']}" if seen and seen.sign["node"] != self._node else ""
        return f"\nlog of {name}: {file}{remote}" if remote or file.exists() else ""

    def close(self) -> None:
        """Stop watching and delete the signs."""
        self._end.set()
        with contextlib.suppress(Exception):
            internal_kv._internal_kv_del(f"{self.run}/", del_by_prefix=True, namespace=NAMESPACE)

    def kill_left(self) -> None:
        """Kill every process that gave a sign, and its children, with SIGKILL: a stopped process ignores the rest.

        Actors of this host may end by ``ray.kill`` first: Ray reports one that ends otherwise as an error, at length,
        where the user reads how the run ended.
        """
        seen = list(self._seen.values())
        here = _running(one.sign["process"] for one in seen if one.sign["node"] == self._node)
        psutil.wait_procs(here, timeout=LEAVE_SECONDS)
        self._kill(seen)

    def _kill(self, signs: Sequence[_Seen]) -> None:
        tasks = []
        for seen in signs:
            victims = [seen.sign["process"], *seen.sign["children"]]
            if seen.sign["node"] == self._node:
                kill(victims)
                continue
            with contextlib.suppress(Exception):
                there = NodeAffinitySchedulingStrategy(seen.sign["node"], soft=False)
                tasks.append(ray.remote(kill).options(num_cpus=0, scheduling_strategy=there).remote(victims))
        with contextlib.suppress(Exception):
            ray.wait(tasks, num_returns=len(tasks), timeout=KILL_SECONDS)

    def _look(self) -> None:
        before = time.monotonic()
        while not self._end.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - before > self._limit / 2:  # this process was stopped, not the others
                for seen in list(self._seen.values()):
                    seen.at += now - before
                    seen.moved += now - before
            before = now
            with contextlib.suppress(Exception):
                for name in self._names:
                    self._look_at(name, now)
                self._looked = now

    def _look_at(self, name: str, now: float) -> None:
        key = self._keys[name]
        value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if value is None or key != self._keys[name]:
            return
        sign, seen = json.loads(value), self._seen.get(name)
        if seen is None:
            self._seen[name] = _Seen(now, now, sign)
        elif sign["count"] != seen.sign["count"]:
            # While a child is stopped, the participant's time of life is not renewed.
            at = seen.at if sign["stopped"] else now
            moved = seen.moved if sign["progress"] == seen.sign["progress"] else now
            self._seen[name] = _Seen(at, moved, sign)


def kill(processes: Sequence[Sequence[float]]) -> None:
    """Send SIGKILL to each ``(pid, start time)`` of this host, if it is still the same process, and wait for it."""
    killed = _running(processes)
    for process in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(killed, timeout=KILL_SECONDS)


def _running(processes: Iterable[Sequence[float]]) -> list[psutil.Process]:
    """Return those ``(pid, start time)`` of this host that are still the same process."""
    found = []
    for pid, started in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if abs(process.create_time() - started) < 1:
                found.append(process)
    return found
