# SPDX-License-Identifier: Apache-2.0
"""Kill 50 saves with -9 at random moments: whatever has a checkpoint's name loads and equals the uninterrupted run."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.run_folder import checkpoints
from tests.helpers.models import make_model
from tests.helpers.saver import check_for_ever, running, save_for_ever

# The files are the same on any device, and where processes cannot be forked each takes ten seconds to start.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="writes no other files with CUDA")

KILLS = 50


def kill_saves(folder: Path, in_place: bool = False) -> tuple[list[str], Counter]:
    """Kill savers until a checkpoint is wrong; return what is wrong with it, and how many kills left which files."""
    delays, outcomes = random.Random(0), Counter()
    seconds = measure_save(folder)
    checked: set[Path] = set()
    with running(check_for_ever, folder) as (_, checker):
        for _ in range(KILLS):
            last = checkpoints(folder)[-1]
            with running(save_for_ever, folder, last, in_place) as (saver, pipe):
                began = receive(pipe)
                time.sleep(max(0.0, began + delays.uniform(0.0, seconds) - time.monotonic()))
                saver.kill()
                saver.join()
                done = [said for said in rest(pipe) if isinstance(said, int)]
            partial = list((folder / "checkpoints").glob(".*.partial"))
            outcomes[phase(partial[0]) if partial else "done" if done else "nothing"] += 1
            named = set((folder / "checkpoints").glob("step-*"))
            assert {f"step-{step:06d}" for step in done} <= {path.name for path in named}
            for path in sorted(named - checked):
                checker.send(path)
                if problem := receive(checker):
                    return [problem], outcomes
            checked |= named
            # Adapt the delay so that about every second save completes, whatever its speed: kills then hit all phases.
            seconds *= 0.9 if done else 1.1
    return [], outcomes


def measure_save(folder: Path) -> float:
    """Return the longest of three times from the call to the complete checkpoint, in seconds."""
    times = []
    with running(save_for_ever, folder, None) as (_, pipe):
        for _ in range(3):
            began = receive(pipe)
            assert isinstance(receive(pipe), int)
            times.append(time.monotonic() - began)
    return max(times)


def receive(pipe: Any) -> Any:
    """Return the next message of a process."""
    assert pipe.poll(60), "the process says nothing"
    return pipe.recv()


def rest(pipe: Any) -> Iterator[Any]:
    """Yield the messages that a killed process had still sent."""
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll():
            yield pipe.recv()


def phase(partial: Path) -> str:
    """Name the phase in which a save was killed, by the files it left."""
    names = {path.name for path in partial.iterdir()}
    steps = ["adapter", "optimizer.safetensors", "rng.safetensors", "state.json"]
    return next((f"before {name}" for name in steps if name not in names), "before the rename")


def test_a_save_killed_at_any_moment_leaves_only_checkpoints_that_load(tmp_path):
    make_model(tmp_path / "model", "qwen3", tied=True, num_hidden_layers=1)
    problems, outcomes = kill_saves(tmp_path)
    print(f"\n{KILLS} kills left: {dict(outcomes)}")
    assert problems == []
    # Fails if the kills missed the saves.
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("before")) >= KILLS / 5
    assert len(outcomes) >= 4


def test_the_kills_find_checkpoints_that_are_written_in_place(tmp_path):
    make_model(tmp_path / "model", "qwen3", tied=True, num_hidden_layers=1)
    problems, _ = kill_saves(tmp_path, in_place=True)
    assert problems and "CheckpointError" in problems[0]
