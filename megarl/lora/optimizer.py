# SPDX-License-Identifier: Apache-2.0
"""Keep mcore's optimizers consistent with an adapter: fp32 copies after a load, state for distributed checkpoints.

mcore keeps an fp32 copy of every bf16 parameter: the whole parameter or, in its DistributedOptimizer, this rank's range
of it. The next update starts from that copy. If a matrix is loaded and its copy is not, the update brings the old
matrix back.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.errors import AdapterError, UnsupportedError
from megarl.model.optimizer.optimizer_shards import parts_of, shards_of


def check_copies(parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: Any | None) -> None:
    """Refuse to load matrices that an optimizer has copies of, unless it is given and the copies can be renewed.

    Args:
        parameters: this rank's ``(name, parameter)`` pairs.
        optimizer: from ``get_megatron_optimizer``, or None.

    Raises:
        AdapterError: the optimizer is missing, or does not train this adapter.
        UnsupportedError: the optimizer's copies cannot be reached.
    """
    # A float32 parameter has no copy; it is updated in place.
    copied = [
        (name, parameter)
        for name, parameter in parameters
        if hasattr(parameter, "main_param") and parameter.dtype is not torch.float32
    ]
    if optimizer is None:
        if copied:
            raise AdapterError(
                f"'{copied[0][0]}' has a copy in mcore's optimizer, from which the next update would bring the old "
                "matrix back; give the optimizer too: adapter.load(path, optimizer)"
            )
        return
    for part in parts_of(optimizer):
        settings = part.config
        for field in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(settings, field, False):
                raise UnsupportedError(
                    f"optimizer config: {field} is true; an adapter that it trains cannot be loaded into. Load it "
                    "before the optimizer is made"
                )
    inner = [part.optimizer for part in parts_of(optimizer) if part.optimizer is not None]
    held = {id(main) for adam in inner for group in adam.param_groups for main in group["params"]}
    for name, parameter in copied:
        # A DistributedOptimizer may hold no part of a parameter on this rank.
        if parameter.main_param is not None and id(parameter.main_param) not in held:
            raise AdapterError(f"the optimizer that was given does not train '{name}'; give the one that does")


def renew_copies(optimizer: Any) -> None:
    """Overwrite mcore's fp32 copies (whole, or this rank's ranges) with the model's parameters."""
    with torch.no_grad():
        for parameter, shard in shards_of(optimizer).items():
            if shard.main is not parameter:
                shard.main.copy_(shard.cut(parameter.detach()))


def complete_adam_states(optimizer: Any) -> None:
    """Complete the state of torch's AdamW inside mcore's optimizers, for ``sharded_state_dict``.

    Every parameter without moments gets zero moments, and every parameter gets its own step counter. Call this before
    the optimizer's ``sharded_state_dict``, and load with ``load_optimizer``. Without Transformer Engine and Apex mcore
    uses torch's AdamW, and then (0.16 to 0.19) cannot save an optimizer that has made no update. Other optimizers are
    left unchanged.
    """
    for part in _with_torchs_adam(optimizer):
        adam = part.optimizer
        for group in adam.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = adam.state[parameter]
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment not in state:
                        state[moment] = torch.zeros_like(parameter.data)
                device = parameter.device if on_device else None
                state["step"] = torch.tensor(float(state.get("step", 0.0)), device=device)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Call mcore's ``load_state_dict`` of a distributed checkpoint, corrected for torch's AdamW.

    With torch's AdamW, mcore (0.16 to 0.19) looks for the step counter among the moments, which do not have it, and
    gives all parameters one counter, which then counts every parameter's update.

    Args:
        optimizer: from ``get_megatron_optimizer``.
        state: result of ``dist_checkpointing.load`` for its ``sharded_state_dict``.
    """
    distributed = [part for part in _with_torchs_adam(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in distributed:
        part._set_main_param_and_optimizer_states = partial(_set_beside_step, part)
    try:
        optimizer.load_state_dict(state)
    finally:
        for part in distributed:
            del part._set_main_param_and_optimizer_states
    complete_adam_states(optimizer)


def _set_beside_step(part: Any, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, place = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
    type(part)._set_main_param_and_optimizer_states(part, parameter, {"step": state["step"], **tensors})


def _with_torchs_adam(optimizer: Any) -> list[Any]:
    return [part for part in parts_of(optimizer) if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)]
