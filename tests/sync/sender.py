# SPDX-License-Identifier: Apache-2.0
"""A trainer in a process of its own, which can be told to break a sync at a given point, or can be killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.checkpoint_engine.transports.shm import ShmSender
from megarl.futures import in_thread
from tests.e2e.sampler_rig import PeftTrainer

LORA = {"r": 64, "lora_alpha": 64, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SEED = 100
# Seconds that a sender waits in the middle of a transfer, for the main process to do something.
PATIENCE = 60.0
_trainer: Any = None


class BreakingTrainer(PeftTrainer):
    """Breaks the next sync.

    Attributes:
        fault: one of ``FAULTS`` of ``tests.sync.breaking``, or None.
        flag: file that this process makes in the middle of a transfer; it then waits until the file is gone.
    """

    fault: str | None = None
    flag: Path
    exports = 0  # in this call

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        named = list(super().export_weights(adapter_only))
        if self.fault is None:
            yield from named
            return
        damage = getattr(self, f"_{self.fault}", None)
        if damage is not None:
            named = damage(named)
        half = len(named) // 2
        self.exports += 1
        yield from named[:half]
        if self.exports == 1 + adapter_only:  # an adapter's first is for the plan
            self._pause()
        yield from named[half:]

    def send_weights(self, version: int, kind: Any) -> Any:
        if self.fault == "wrong_version":
            self.version = version + 1
        sender = self._outbox.sender
        put = sender.put
        if self.fault == "end_before_receipts":
            sender.end = lambda manifest: os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "flipped_bit":
            sender.put = lambda header, payload: put(header, flipped(payload))
        if self.fault == "truncated":
            sender.put = lambda header, payload: put(header, truncated(sender, payload))
        return super().send_weights(version, kind)

    def _pause(self) -> None:
        if self.fault in ("end_in_transfer", "wait_in_transfer"):
            self.flag.touch()
            deadline = time.monotonic() + PATIENCE
            while self.flag.exists() and time.monotonic() < deadline:
                time.sleep(0.01)

    def _wrong_rank(self, named: list) -> list:
        return [(name, tensor[:-1].contiguous() if ".lora_A." in name else tensor) for name, tensor in named]

    def _wrong_name(self, named: list) -> list:
        return [(name.replace("layers.1.", "layers.9."), tensor) for name, tensor in named]

    def _missing(self, named: list) -> list:
        return named[:-1]

    def _not_finite(self, named: list) -> list:
        return [*named[:-1], (named[-1][0], torch.full_like(named[-1][1], torch.inf))]


def flipped(payload: torch.Tensor) -> torch.Tensor:
    """Flip a bit of a bucket, whose digests are computed."""
    payload[100] ^= 1
    return payload


def truncated(sender: Any, payload: torch.Tensor) -> torch.Tensor:
    """Cut a bucket in half: its file where it is one, else what is sent of it."""
    half = len(payload) // 2
    if isinstance(sender, ShmSender):
        os.truncate(sender._folder / f"{sender._count:05}.data", half)
    return payload[:half]


def start(model: str, flag: str) -> int:
    """Build the trainer of this process; return the process's id."""
    global _trainer
    torch.set_num_threads(1)
    _trainer = BreakingTrainer(Path(model), LORA)
    _trainer.flag = Path(flag)
    return os.getpid()


def call(method: str, version: int | None, fault: str | None, *arguments: Any) -> Any:
    """Call a method of the trainer, whose weights are those of a version."""
    _trainer.fault, _trainer.exports, _trainer._plans = fault, 0, None  # as if no other adapter had been before
    if version is not None and version != getattr(_trainer, "version", None):
        _trainer.randomise(SEED + version)
        _trainer.version = version
    return getattr(_trainer, method)(*arguments)


class Sender:
    """The manager's ``Source``: the trainer behind a process boundary, which is started again after its death."""

    def __init__(self, model: Path, flag: Path) -> None:
        self._model, self.flag, self.fault = model, flag, None
        self.process: psutil.Process | None = None
        self._pool: ProcessPoolExecutor | None = None
        self.restart()

    def restart(self) -> None:
        """Start a new process."""
        self.close()
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.process = psutil.Process(self._pool.submit(start, str(self._model), str(self.flag)).result())

    def places(self) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return in_thread(lambda: [self._submit("place", None).result()])

    def prepare(self, *arguments: Any) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return self._submit("prepare_sync", None, *arguments)

    def send(self, version: int, kind: Any) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return self._submit("send_weights", version, version, kind)

    def finish(self) -> Future:
        """See ``checkpoint_engine.participants.Source``."""
        return self._submit("finish_sync", None)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            if self.process is not None and self.process.is_running():
                self.process.kill()

    def _submit(self, method: str, version: int | None, *arguments: Any) -> Future:
        assert self._pool is not None
        return self._pool.submit(call, method, version, self.fault, *arguments)
