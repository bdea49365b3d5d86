# SPDX-License-Identifier: Apache-2.0
"""Break a sync in every way at every stage, between a trainer and two real engines, and go on afterwards.

After each fault the error must name the participant and the stage within ``LIMIT`` seconds, no engine may sample, and
base and adapter must bring both back: dead processes are started again, engines are readmitted.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.transports.shm_folders import ROOT
from megarl.config import CheckpointEngineConfig
from megarl.sampler.process import SamplerProcess
from tests.e2e.sampler_rig import PeftTrainer, make_model, prompts, raised
from tests.helpers.processes import find_engine
from tests.sync.breaking import FAULTS, Fault, end_engine, stop_engine
from tests.sync.sender import LORA, SEED, Sender

LIMIT, TIMEOUT = 30.0, 20.0
# Transport, and ranks of the second engine.
WAYS = (("shm", 1), ("gloo", 1), ("ipc", 1), ("shm", 2), ("ipc", 2))
AGREEMENT = 1e-4
SAMPLER = {
    "samples_per_prompt": 2,
    "max_prompt_tokens": 96,
    "max_response_tokens": 16,
    "kv_cache_gib": 0.05,
    "max_num_seqs": 16,
}


class Engine(SamplerProcess):
    """An engine that something happens to before its next flip."""

    before_flip: Callable[[], None] | None = None

    def flip(self, *arguments: Any) -> Future:
        action, self.before_flip = self.before_flip, None
        if action is not None:
            action()
        return super().flip(*arguments)


class Row(NamedTuple):
    """The consequences of a fault.

    Attributes:
        way, fault: what was broken.
        seconds: until the error.
        recovery: seconds until both engines sampled again.
        error: largest |difference| of logprobs from PEFT's after that.
        problem: what should not have been; empty if the row is good.
        message: the error.
    """

    way: str
    fault: str
    seconds: float
    recovery: float
    error: float
    problem: str
    message: str


class Rig:
    """A trainer's process, two engines and their manager.

    Args:
        folder: has the model.
        transport: ``checkpoint_engine.transport``.
        tensor: ``sampler.parallel.tensor`` of the second engine.
    """

    def __init__(self, folder: Path, transport: str, tensor: int) -> None:
        self.folder, self._tensors, self._way = folder, (1, tensor), way_of(transport, tensor)
        self.config = CheckpointEngineConfig(transport=transport, timeout_seconds=TIMEOUT, bucket_mib=1)
        self.engines = [self.start_engine(index) for index in range(2)]
        self.sender = Sender(folder / "model", folder / "flag")
        self.reference = PeftTrainer(folder / "model", LORA)
        self.manager = CheckpointEngineManager(self.sender, self.engines, self.config)
        self.version = 0
        for engine in self.engines:
            engine.wait()
        for kind in ("base", "adapter"):
            self.manager.sync(0, kind)

    def start_engine(self, index: int) -> Engine:
        """Start an engine; it is waited for where it is used."""
        model = {"path": str(self.folder / "model"), "dtype": "float32"}
        lora = {name: LORA[name] for name in ("r", "lora_alpha", "target_modules")}
        sampler, log = SAMPLER | {"parallel": {"tensor": self._tensors[index]}}, self.folder / f"engine-{index}.log"
        return Engine(model, lora=lora, sampler=sampler, checkpoint_engine=self.config, index=index, log=log, threads=1)

    def run(self, fault: Fault) -> Row:
        """Break the next sync, and recover."""
        self.version += 1
        self.sender.fault = "wait_in_transfer" if fault.act and not fault.at_flip else fault.name
        started = time.monotonic()
        outcome: list[str] = []
        if fault.at_flip:
            self.engines[1].before_flip = lambda: fault.act(self)
            outcome.append(raised(lambda: self.manager.sync(self.version, fault.kind)))
        else:
            outcome.append(self._sync_beside(fault))
        seconds = time.monotonic() - started
        problem = self._problem(fault, outcome[0], seconds)
        started = time.monotonic()
        self.recover()
        recovery, error = time.monotonic() - started, self.error()
        if not error < AGREEMENT:
            problem = problem or f"after recovery logprobs differ by {error:.1e}"
        return Row(self._way, fault.title, seconds, recovery, error, problem, outcome[0])

    def _sync_beside(self, fault: Fault) -> str:
        """Sync in a thread; act when the transfer is in its middle."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(raised, lambda: self.manager.sync(self.version, fault.kind))
            while fault.act and not self.sender.flag.exists() and not running.done():
                time.sleep(0.01)
            if fault.act:
                fault.act(self)
                self.sender.flag.unlink(missing_ok=True)
            return running.result()

    def _problem(self, fault: Fault, message: str, seconds: float) -> str:
        # The workers of an engine of several ranks are processes of their own, which receive all the same.
        apart = fault.act in (end_engine, stop_engine) and max(self._tensors) > 1
        unseen = (fault.unseen or apart) and message == "nothing"
        if not unseen and (absent := [part for part in fault.says if part not in message]):
            return f"the error does not say {absent}"
        if seconds > LIMIT:
            return f"the error took {seconds:.0f} s"
        asked = self.engines[1:] if unseen else self.engines
        if fault.act is stop_engine and unseen:
            asked = []  # it answers nothing
        for engine in asked:
            for version in (self.version - 1, self.version):
                answer = raised(lambda engine=engine, version=version: engine.generate(prompts(1), version))
                if answer == "nothing":
                    return f"{engine.name} sampled from version {version}"
        return ""

    def recover(self) -> None:
        """Start dead processes again, and readmit the engines."""
        self.sender.fault = None
        if not self.sender.process.is_running() or self.sender.process.status() == psutil.STATUS_ZOMBIE:
            self.sender.restart()
        for index, engine in enumerate(self.engines):
            if engine.process.poll() is not None or not has_engine(engine):
                engine.close()
                self.engines[index] = self.start_engine(index)
                self.manager.replace(self.engines[index], "it was killed")
        for engine in self.engines:
            engine.wait()
        self.manager.readmit(self.version)

    def error(self) -> float:
        """Return the largest |difference| between PEFT's logprobs and those of what both engines draw."""
        self.reference.randomise(SEED + self.version)
        return max(
            float(np.abs(self.reference.logprobs(one.prompt_ids, one.response_ids, 1.0) - one.logprobs).max())
            for engine in self.engines
            for group in engine.generate(prompts(2), self.version)
            for one in group
        )

    def close(self) -> None:
        """End all processes."""
        for engine in self.engines:
            engine.close()
        with contextlib.suppress(Exception):
            self.sender.finish().result(TIMEOUT)
        self.sender.close()


def has_engine(engine: Engine) -> bool:
    """Return True if vLLM's own process lives and is not stopped."""
    try:
        status = find_engine(psutil.Process(engine.process.pid)).status()
        return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except (ValueError, psutil.Error):
        return False


def way_of(transport: str, tensor: int) -> str:
    """Return the transport and, if it is not 1, the ranks of the second engine."""
    return transport if tensor == 1 else f"{transport} TP{tensor}"


def rows(words: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each way and fault whose names have all words."""
    for transport, tensor in WAYS:
        way = way_of(transport, tensor)
        faults = [one for one in FAULTS if all(word in f"{way}, {one.title}" for word in words)]
        if not faults:
            continue
        with tempfile.TemporaryDirectory(prefix="megarl-faults-") as folder:
            make_model("llama", Path(folder) / "model")
            rig = Rig(Path(folder), transport, tensor)
            try:
                for fault in faults:
                    yield rig.run(fault)
            finally:
                rig.close()
        left = sorted(path.name for path in ROOT.glob("*megarl*"))
        yield Row(way, "nothing is left in /dev/shm", 0.0, 0.0, 0.0, ", ".join(left), "")


def table(found: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| transport | fault | error after, s | sampling again after, s | PEFT - sampler | error |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    for row in found:
        message = row.message.partition("not synced: ")[2][:120] or row.message[:120]
        mark = f"**{row.problem}** " if row.problem else ""
        times = f"{row.seconds:.1f} | {row.recovery:.1f} | {row.error:.1e}"
        lines.append(f"| {row.way} | {row.fault} | {times} | {mark}{message} |")
    return "\n".join(lines)
