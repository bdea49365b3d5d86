# SPDX-License-Identifier: Apache-2.0
"""Save and load adapter, optimizer and schedule with mcore's distributed checkpoints, as Megatron-LM does.

The base model never changes, so it is not saved. A checkpoint saved at one layout loads at any other.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from megarl.lora import LoraAdapter, adapters_of, complete_adam_states, load_optimizer
from megarl.parallel.device import cuda_names

TRACKER = "latest_checkpointed_iteration.txt"


def sharding_metadata() -> dict[str, Any]:
    """Return the metadata of ``--dist-ckpt-optim-fully-reshardable``, which lets a load change the layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def unwrap_model(model: list) -> torch.nn.Module:
    """Return the model below DDP and Float16Module, whose prefixes checkpoints do not have."""
    module = model[0]
    while hasattr(module, "module"):
        module = module.module
    return module


def generate_state_dict(model: list, optimizer: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """Return a checkpoint's entries for the model and the optimizer."""
    metadata = sharding_metadata()
    complete_adam_states(optimizer)  # megarl: mcore leaves this out where torch's AdamW replaces Transformer Engine's
    with cuda_names():  # adapters_of is megarl's
        state: dict[str, Any] = {"model": adapters_of(unwrap_model(model).sharded_state_dict(metadata=metadata))}
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def save_checkpoint(folder: str, iteration: int, model: list, optimizer: Any, scheduler: Any) -> None:
    """Write ``folder/iter_0000010`` and the tracker file. Collective."""
    target = Path(folder) / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = generate_state_dict(model, optimizer)
    state |= {"iteration": iteration, "opt_param_scheduler": scheduler.state_dict()}
    dist_checkpointing.save(state, str(target))
    if dist.get_rank() == 0:
        (Path(folder) / TRACKER).write_text(str(iteration))
    dist.barrier()


def load_checkpoint(folder: str, model: list, optimizer: Any, scheduler: Any) -> int:
    """Restore the latest checkpoint of a folder; return the number of iterations done. Collective."""
    iteration = int((Path(folder) / TRACKER).read_text())
    wanted = generate_state_dict(model, optimizer, is_loading=True)
    state = dist_checkpointing.load(wanted, str(Path(folder) / f"iter_{iteration:07d}"))
    refused = unwrap_model(model).load_state_dict(state["model"], strict=False).unexpected_keys
    assert not refused, refused
    with cuda_names():
        load_optimizer(optimizer, state["optimizer"])  # megarl: optimizer.load_state_dict, likewise
    scheduler.load_state_dict(state["opt_param_scheduler"])
    return state["iteration"]


def load_base_checkpoint(folder: str, model: torch.nn.Module, adapter: LoraAdapter) -> None:
    """Load the base's weights from a checkpoint made without adapters (``--pretrained-checkpoint``). Collective."""
    with adapter.without_adapters():  # megarl: that checkpoint has no adapters
        state = {"model": model.sharded_state_dict(metadata=sharding_metadata())}
        model.load_state_dict(dist_checkpointing.load(state, folder)["model"])
