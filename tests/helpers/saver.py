# SPDX-License-Identifier: Apache-2.0
"""Processes for test_kill.py: one trains and saves until it is killed, one checks the checkpoints that are left.

They are not in the test's module, because each of a hundred processes would import what the test imports.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megarl.model.megatron_model import MegatronModel
from megarl.parallel.rendezvous import ALONE
from megarl.run_folder import step_of
from megarl.verify.launch import warm_up
from tests.helpers.tiny_run import build, everything, train


@contextlib.contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``(process, pipe)`` of ``function(pipe, *args)``, forked from the fork server; SIGKILL it at the end."""
    warm_up()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def save_for_ever(pipe: Any, folder: Path, resume: Path | None, in_place: bool = False) -> None:
    """Train a step, save, and repeat. Send the time when a save begins, and the step when it is complete."""
    from megarl.model.checkpoint import training_state

    if in_place:
        training_state.publish = _write_in_place
    model = _build_alone(folder)
    if resume:
        model.load_checkpoint(resume)
    while True:
        train(model, range(model.version, model.version + 1))
        pipe.send(time.monotonic())
        model.save_checkpoint(folder / "checkpoints" / f"step-{model.version:06d}", {"step": model.version})
        model.finish_checkpoint()
        pipe.send(model.version)


def _write_in_place(target: Path, fill: Callable[[Path], None]) -> None:
    """Write as ``publish`` must not: under the final name."""
    target.mkdir()
    fill(target)


def check_for_ever(pipe: Any, folder: Path) -> None:
    """Load each checkpoint that is named. Answer "", or what is wrong with it."""
    loaded, straight = _build_alone(folder), _build_alone(folder)
    truth: list[str] = []
    while True:
        path = pipe.recv()
        try:
            step = loaded.load_checkpoint(path)["step"]
        except Exception as error:
            pipe.send(f"{path.name}: {type(error).__name__}: {error}")
            continue
        while len(truth) < step:
            train(straight, range(len(truth), len(truth) + 1))
            truth.append(_digest(straight))
        right = step == loaded.version == step_of(path) and _digest(loaded) == truth[step - 1]
        pipe.send("" if right else f"{path.name} is not the state of step {step}")


def _build_alone(folder: Path) -> MegatronModel:
    """Build the model on a single rank, as torchrun would start it."""
    os.environ.update(ALONE)
    torch.set_num_threads(1)
    return build(folder, {}, target_modules=["q_proj", "down_proj"])


def _digest(model: MegatronModel) -> str:
    """Digest everything that training continues from. Random states are left out, since nothing here draws."""
    state = {name: tensor for name, tensor in everything(model).items() if not name.startswith("rng")}
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode() + state[name].numpy().tobytes())
    return whole.hexdigest()
