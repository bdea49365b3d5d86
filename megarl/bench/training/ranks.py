# SPDX-License-Identifier: Apache-2.0
"""Run one contender as a process for each rank, with a log each. If a rank fails, the others are killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.bench.files import file_of
from megarl.bench.training.settings import BenchSettings
from megarl.errors import ConfigError
from megarl.network import LOOPBACK
from megarl.parallel.rendezvous import ALONE, open_store, rank_environment

# Starts a rank.
COMMAND = [sys.executable, "-m", "megarl.bench.training.contender"]
# Seconds between two looks at the ranks.
LOOK_SECONDS = 0.05


def check_gpus(needed: int, device: str, reason: str) -> None:
    """Check that there are GPUs enough; ranks on CPUs share the cores.

    Args:
        needed: number of GPUs.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        reason: what needs them, for the message.

    Raises:
        ConfigError: torch sees fewer.
    """
    found = torch.cuda.device_count()
    if found < needed and (device == "cuda" or (device == "auto" and found)):
        raise ConfigError(f"bench: {reason} needs {needed} GPUs, but torch sees {found}")


def run_contender(
    name: str, settings: BenchSettings, out: Path, flags: Sequence[str] = (), label: str | None = None
) -> dict[str, Any]:
    """Run one contender on every rank of the layout and read rank 0's result.

    Args:
        name: the contender, or ``"gemm"``.
        settings: what to measure; the layout says on how many ranks.
        out: folder for result and logs.
        flags: see ``contender.measure``.
        label: name of the result and the logs; default: ``name``.

    Returns:
        The result. If a rank failed, ``error`` holds the last line of its output, and the log of rank 0 names it.
    """
    label = label or name
    result, size = file_of(out, label, 0, "json"), settings.world_size
    result.unlink(missing_ok=True)
    failed = _run([name, label, settings.model_dump_json(), str(out), *flags], size, out, label)
    if failed is None and result.is_file():
        return json.loads(result.read_text())
    rank, status = failed or (0, 0)
    log = file_of(out, label, rank, "log")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {status}"
    if size == 1:
        return {"name": name, "error": last}
    error = f"rank {rank} of {size} failed with status {status}: {last}"
    with file_of(out, label, 0, "log").open("a") as handle:
        handle.write(f"\n{error}; its log: {log}; the other ranks were killed\n")
    return {"name": name, "error": error}


def _run(arguments: list[str], size: int, out: Path, label: str) -> tuple[int, int] | None:
    """Run the ranks to their end; return ``(rank, status)`` of the first that failed."""
    store = open_store() if size > 1 else None
    logs = [file_of(out, label, rank, "log") for rank in range(size)]
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as handle:
                processes.append(
                    subprocess.Popen(
                        [*COMMAND, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=handle,
                        stderr=subprocess.STDOUT,
                        env=_environment(rank, size, 0 if store is None else store.port),
                    )
                )
        while True:
            ended = [process.poll() for process in processes]
            failed = [rank for rank, status in enumerate(ended) if status]
            if failed:
                # A rank that lost its peer fails too, but wrote its last line after the peer's.
                first = min(failed, key=lambda rank: logs[rank].stat().st_mtime_ns)
                return first, ended[first] or 0
            if None not in ended:
                return None
            time.sleep(LOOK_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of a rank. On CPUs the ranks divide the cores."""
    defaults = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if size == 1:
        return defaults | os.environ | ALONE
    defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
    return defaults | os.environ | rank_environment(rank, size, LOOPBACK, port) | {"LOCAL_RANK": str(rank)}
