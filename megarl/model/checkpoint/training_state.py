# SPDX-License-Identifier: Apache-2.0
"""Save and load training checkpoints: adapter, fp32 main weights, Adam moments, random states, the caller's own state.

Tensors are stored whole under PEFT's names, so a checkpoint loads at any layout, with or without the distributed
optimizer. Only the random states belong to ranks. The base model is never stored. ``digests`` adds a digest
of each file and tensor. Training stops only while the state is copied to rank 0's host memory; a thread then writes it.
A checkpoint directory appears by one rename, so it is either complete or absent.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import CheckpointError
from megarl.files import publish
from megarl.model.adapter import Adapter, Optimizer
from megarl.model.checkpoint.digests import FORMAT, read_state, seal, verify
from megarl.model.checkpoint.identity import difference
from megarl.model.checkpoint.writer import BackgroundWriter
from megarl.model.weights.sharded_tensor import ShardedTensor, collect
from megarl.model.weights.streaming import stream_full
from megarl.parallel.groups import Groups, on_rank_zero
from megarl.parallel.mcore import release
from megarl.run_folder import ADAPTER, STATE

OPTIMIZER, RNG = "optimizer.safetensors", "rng.safetensors"
MAIN = "main"


def save(
    path: str | Path,
    adapter: Adapter,
    optimizer: Optimizer,
    groups: Groups,
    writer: BackgroundWriter,
    *,
    identity: Mapping[str, Any],
    version: int,
    extra: Mapping[str, Any],
) -> None:
    """Copy the state to rank 0 and start writing it. Collective. Waits until the previous save has ended.

    Args:
        path: the checkpoint directory to create; it must not exist yet.
        writer: this rank's writer. Only rank 0's writes.
        identity: describes the base model, from ``identify``. Rank 0's is stored.
        version: the policy version.
        extra: the caller's JSON-able state (schedule, data cursor, metrics).

    Raises:
        CheckpointError: the directory exists, or its parent cannot be made; or the previous save failed, and this one
            was not started. A later failure of this save is raised by the next call of ``save``, ``load`` or
            ``writer.wait``.
        TypeError: ``extra`` is not JSON-able.
    """
    target = Path(path)
    state = {
        "format": FORMAT,
        "model": dict(identity),
        "version": version,
        "optimizer_steps": optimizer.steps(),
        "topology": vars(groups.topology),
        "megatron_core": release(),
        "extra": dict(extra),
    }
    state = json.loads(json.dumps(state))  # a copy; raises now if it is not JSON-able
    on_rank_zero(lambda: _prepare(target, writer))
    write_adapter = adapter.snapshot()
    whole: dict[str, torch.Tensor] = {}
    for kind, tensors in _optimizer_tensors(adapter, optimizer).items():
        whole |= {f"{kind}.{name}": tensor for name, tensor in collect(stream_full(tensors, groups)).items()}
    states: list[Any] = [None] * groups.topology.world_size
    dist.gather_object(_rng_state(), states if groups.rank == 0 else None, dst=0)

    def fill(folder: Path) -> None:
        write_adapter(folder / ADAPTER)
        save_file(whole, str(folder / OPTIMIZER))
        save_file({f"{rank}.{k}": v for rank, s in enumerate(states) for k, v in s.items()}, str(folder / RNG))
        (folder / STATE).write_text(seal(folder, state))

    if groups.rank == 0:
        writer.start(lambda: _write(target, fill))


def _prepare(target: Path, writer: BackgroundWriter) -> None:
    """Wait for the previous save, then check that ``target`` can be created, before anything is copied."""
    writer.wait()
    if target.exists():
        raise CheckpointError(f"checkpoint '{target}' exists already; choose another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint '{target}' cannot be written: {error}") from error


def _write(target: Path, fill: Callable[[Path], None]) -> None:
    try:
        publish(target, fill)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors raises its own class when the disk is full
        raise CheckpointError(f"checkpoint '{target}' cannot be written: {error}") from error


def load(
    path: str | Path,
    adapter: Adapter,
    optimizer: Optimizer,
    groups: Groups,
    writer: BackgroundWriter,
    *,
    base: str | Path,
) -> tuple[int, dict[str, Any]]:
    """Restore a checkpoint made at any layout. Collective. Waits for a running save. Each rank reads only its slices.

    Args:
        path: the checkpoint directory.
        base: the Hugging Face folder of the model that is loaded here.

    Returns:
        ``(policy version, extra)``. At the layout of the save, everything is bitwise as it was. At another layout, the
        random states stay as this process seeded them.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or of another model; or the running save failed.
        AdapterError: the checkpoint's adapter has another rank or other targets.
    """
    on_rank_zero(writer.wait)
    folder = Path(path)
    # verify() reads every byte, so rank 0 does it once; the other ranks then read their slices.
    on_rank_zero(lambda: check_base(folder, verify(folder), base))
    state = read_state(folder)
    values = _values(optimizer)
    try:
        with safe_open(str(folder / OPTIMIZER), framework="pt", device="cpu") as source:
            adapter.read(folder / ADAPTER)
            for kind, held in values.items():
                for tensor in adapter.tensors(held):
                    tensor.load(source.get_slice(f"{kind}.{tensor.name}"), groups)
        if state["topology"] == vars(groups.topology):
            _restore_rng(folder / RNG, groups.rank)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint '{folder}' is damaged: {error}") from error
    optimizer.restore(state["optimizer_steps"], values.pop(MAIN), values)
    return state["version"], state["extra"]


def check_base(folder: Path, state: Mapping[str, Any], base: str | Path) -> None:
    """Refuse a checkpoint that was trained on another base model.

    Args:
        folder: the checkpoint directory.
        state: the parsed state, from ``digests.read_state``.
        base: the Hugging Face folder that ``model.path`` names.

    Raises:
        CheckpointError: the base models differ; the message names the first field or tensor that does.
        ModelError: ``base`` is incomplete.
    """
    if reason := difference(state["model"], base):
        raise CheckpointError(
            f"checkpoint '{folder}' was trained on another model than model.path '{base}': {reason}; set model.path to "
            "the model it was trained on"
        )


def _values(optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Map ``main``/``exp_avg``/``exp_avg_sq`` to {PEFT name: tensor shaped like this rank's parameter}."""
    return {MAIN: optimizer.main_weights()} | optimizer.moments()


def _optimizer_tensors(adapter: Adapter, optimizer: Optimizer) -> dict[str, list[ShardedTensor]]:
    """Map ``main``/``exp_avg``/``exp_avg_sq`` to this rank's sharded tensors."""
    return {kind: adapter.tensors(held) for kind, held in _values(optimizer).items()}


def _rng_state() -> dict[str, torch.Tensor]:
    """Return this rank's random states by name: CPU, CUDA, and those of mcore's tracker."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return {name: state.cpu().clone() for name, state in states.items()}


def _restore_rng(file: Path, rank: int) -> None:
    prefix = f"{rank}."
    with safe_open(str(file), framework="pt", device="cpu") as source:
        states = {k.removeprefix(prefix): source.get_tensor(k) for k in source.keys() if k.startswith(prefix)}  # noqa: SIM118
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states({name.removeprefix("tracker."): state for name, state in states.items()})
