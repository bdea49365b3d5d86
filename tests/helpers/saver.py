# SPDX-License-Identifier: Apache-2.0
"""Processes for test_kill.py: one that trains and saves until it is killed, one that checks what it left.

Apart from the test, because each of a hundred processes would import what the test imports.
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
    """``(process, pipe)`` of ``function(pipe, *args)``, forked from the fork server; killed with SIGKILL at the end."""
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
    """Train a step, save, and so on; tell when a save begins (the time) and when it is complete (the step)."""
    from megarl.model import checkpoint

    if in_place:
        checkpoint.publish = _write_in_place
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
    """What ``publish`` must not do."""
    target.mkdir()
    fill(target)


def check_for_ever(pipe: Any, folder: Path) -> None:
    """Load each checkpoint that is named; answer "" or what is wrong with it."""
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
    """The model on the only rank, as torchrun would start it."""
    os.environ.update(ALONE)
    torch.set_num_threads(1)
    return build(folder, {}, target_modules=["q_proj", "down_proj"])


def _digest(model: MegatronModel) -> str:
    """Of everything that training goes on from; no random states, since nothing here draws."""
    state = {name: tensor for name, tensor in everything(model).items() if not name.startswith("rng")}
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode() + state[name].numpy().tobytes())
    return whole.hexdigest()
