"""Training checkpoints: adapter, fp32 main weights, Adam moments, random states and the caller's own state.

Everything but the random states is stored whole under PEFT's names, so a checkpoint does not depend on the layout. The
base model is never stored. A checkpoint directory appears by one rename, complete or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import CheckpointError
from megarl.model.adapter import Adapter
from megarl.model.optim import MOMENTS, AdapterOptimizer
from megarl.model.sharding import ShardedTensor, collect
from megarl.model.streaming import stream_full
from megarl.parallel.groups import Groups, on_rank_zero

FORMAT = 1
STATE, OPTIMIZER, RNG, ADAPTER = "state.json", "optimizer.safetensors", "rng.safetensors", "adapter"
# Fields of config.json that decide what the weights mean.
IDENTITY = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "num_local_experts",
    "moe_intermediate_size",
)  # fmt: skip


def model_identity(hf_config: Mapping[str, Any]) -> str:
    """A short digest of what makes two models' adapters interchangeable in shape."""
    chosen = {key: hf_config.get(key) for key in IDENTITY}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def save(
    path: str | Path,
    adapter: Adapter,
    optimizer: AdapterOptimizer,
    groups: Groups,
    *,
    identity: str,
    version: int,
    extra: Mapping[str, Any],
) -> None:
    """Write a checkpoint directory. Collective; rank 0 writes.

    Args:
        path: must not exist yet.
        identity: from ``model_identity``.
        version: the policy version.
        extra: JSON-able state of the caller (schedule, data cursor, metrics).

    Raises:
        CheckpointError: it exists, or cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    on_rank_zero(lambda: _make_partial(target, partial))
    adapter.save(partial / ADAPTER)
    whole: dict[str, torch.Tensor] = {}
    for kind, tensors in _optimizer_tensors(adapter, optimizer).items():
        whole |= {f"{kind}.{name}": tensor for name, tensor in collect(stream_full(tensors, groups)).items()}
    states: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(_rng_state(), states if groups.rank == 0 else None, dst=0)
    state = {
        "format": FORMAT,
        "model": identity,
        "version": version,
        "optimizer_steps": optimizer.steps(),
        "topology": vars(groups.topology),
        "extra": dict(extra),
    }
    on_rank_zero(lambda: _finish(target, partial, whole, states, state))


def _make_partial(target: Path, partial: Path) -> None:
    """An empty directory beside the target."""
    if target.exists():
        raise CheckpointError(f"checkpoint '{target}' exists already; choose another name")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint '{target}' cannot be written: {error}") from error


def _finish(
    target: Path, partial: Path, whole: dict[str, torch.Tensor], states: list[dict[str, torch.Tensor]], state: dict
) -> None:
    """Write what is left, force it to disk, and rename."""
    try:
        save_file(whole, str(partial / OPTIMIZER))
        save_file({f"{rank}.{k}": v for rank, s in enumerate(states) for k, v in s.items()}, str(partial / RNG))
        (partial / STATE).write_text(json.dumps(state, indent=1) + "\n")
        _flush(partial)
        partial.rename(target)
    except (OSError, TypeError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint '{target}' cannot be written: {error}") from error


def load(
    path: str | Path, adapter: Adapter, optimizer: AdapterOptimizer, groups: Groups, *, identity: str
) -> tuple[int, dict[str, Any]]:
    """Restore a checkpoint made at any layout; each rank reads only its slices.

    Returns:
        ``(policy version, extra)``. In the layout it was saved in, everything is bitwise as it was; in another, the
        random states are the ones this process was seeded with.

    Raises:
        CheckpointError: incomplete, damaged, or of another model.
        AdapterError: of another rank or target set.
    """
    folder = Path(path)
    state = read_state(folder)
    if state["model"] != identity:
        raise CheckpointError(
            f"checkpoint '{folder}' belongs to another model (shape digest {state['model']}, this model {identity}); "
            "set model.path to the model it was trained from"
        )
    adapter.load(folder / ADAPTER)
    kinds = _optimizer_tensors(adapter, optimizer)
    try:
        with safe_open(str(folder / OPTIMIZER), framework="pt", device="cpu") as source:
            for kind, tensors in kinds.items():
                for tensor in tensors:
                    tensor.load(source.get_slice(f"{kind}.{tensor.name}"), groups)
        if state["topology"] == vars(groups.topology):
            _restore_rng(folder / RNG, groups.rank)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint '{folder}' is damaged: {error}") from error
    optimizer.restore(state["optimizer_steps"], _values(kinds, groups))
    optimizer.sync_model()
    return state["version"], state["extra"]


def read_state(folder: Path) -> dict[str, Any]:
    """Parsed ``state.json``.

    Raises:
        CheckpointError: missing, not JSON, or of another format.
    """
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"'{folder}' is not a complete checkpoint: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint '{folder}' has format {state.get('format')!r}; this megarl reads {FORMAT}")
    return state


def _optimizer_tensors(adapter: Adapter, optimizer: AdapterOptimizer) -> dict[str, list[ShardedTensor]]:
    """``main``/``exp_avg``/``exp_avg_sq`` -> this rank's sharded tensors."""
    moments = optimizer.moments()
    return {"main": adapter.tensors(optimizer.main_weights())} | {m: adapter.tensors(moments[m]) for m in MOMENTS}


def _values(kinds: dict[str, list[ShardedTensor]], groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
    return {moment: {t.name: t.read() for t in kinds[moment] if t.held(groups)} for moment in MOMENTS}


def _rng_state() -> dict[str, torch.Tensor]:
    """This rank's random states by name."""
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


def _flush(folder: Path) -> None:
    """Force the files to disk before the rename makes them the checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
