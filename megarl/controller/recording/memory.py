# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of a run's processes on this node."""

import threading

import psutil

ROLES = ("ray::TrainerRank", "ray::SamplerEngine")


class MemoryWatch:
    """Samples, in a thread, the private memory (RSS minus shared) of this process, its children and the actors."""

    def __init__(self, interval: float = 2.0) -> None:
        self.interval, self.peak = interval, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Stop sampling; return the peak, GiB."""
        self._stop.set()
        self._thread.join(timeout=5 * self.interval)
        return self.peak

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, sum(map(_private, _processes())) / 2**30)
            self._stop.wait(self.interval)


def _processes() -> set[psutil.Process]:
    this_process = psutil.Process()
    processes = {this_process, *this_process.children(recursive=True)}
    # The actors of a cluster that was started before this process are not its children.
    processes |= {p for p in psutil.process_iter(["name", "cmdline"]) if _title(p).startswith(ROLES)}
    return processes


def _title(process: psutil.Process) -> str:
    return " ".join(process.info.get("cmdline") or [])


def _private(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
        return max(memory.rss - memory.shared, 0)
    except psutil.Error:
        return 0
