# SPDX-License-Identifier: Apache-2.0
"""Refuse what ``train.cuda_graphs`` cannot capture."""

from collections.abc import Mapping
from typing import Any

from megarl.config.trainer import TrainerConfig
from megarl.errors import UnsupportedError
from megarl.families import moe_of

# Elements of 16 bits in the vectors that products of all experts read.
VECTOR = 8


def check_graphs(config: TrainerConfig, shape: Mapping[str, Any]) -> None:
    """Refuse CUDA graphs for computations that differ between micro-batches or that run extra code between kernels.

    Args:
        config: the trainer's config.
        shape: the model's ``config.json``.

    Raises:
        UnsupportedError: a setting does not fit CUDA graphs; the message names it.
    """
    if not config.train.cuda_graphs:
        return
    refused = {
        f"parallel.pipeline = {config.parallel.pipeline}": config.parallel.pipeline > 1,
        f"parallel.context = {config.parallel.context}": config.parallel.context > 1,
        "train.overlap_grad_reduce = true": config.train.overlap_grad_reduce,
    }
    _refuse(refused, "supported are models without pipeline or context parallelism and overlapped reduction")
    _check_dropout(config)
    moe = moe_of(shape)
    if moe is not None:
        _check_experts(config, f"{moe.count_key(shape)} = {shape.get(moe.count_key(shape))}")


def _check_dropout(config: TrainerConfig) -> None:
    """Refuse dropout whose generators would have to be switched: a capture has the default one alone."""
    dropout = config.lora.lora_dropout
    refused = {
        f"parallel.tensor = {config.parallel.tensor}": config.parallel.tensor > 1,
        f"train.recompute = '{config.train.recompute}'": config.train.recompute != "none",
    }
    _refuse(
        {f"lora.lora_dropout = {dropout} and {setting}": dropout > 0 and is_set for setting, is_set in refused.items()},
        "supported is dropout without tensor parallelism and without recomputation",
    )


def _check_experts(config: TrainerConfig, experts: str) -> None:
    """Refuse graphs with experts that are not computed together: the host then waits in every layer."""
    ranks = {"r": config.lora.r, **config.lora.rank_pattern}
    odd = {f"lora rank {name} = {rank}": rank % VECTOR > 0 for name, rank in ranks.items()}
    refused = {
        f"parallel.{axis} = {getattr(config.parallel, axis)}": getattr(config.parallel, axis) > 1
        for axis in ("tensor", "expert", "expert_tensor")
    }
    refused |= {"model.dtype = 'float32'": config.model.dtype == "float32"} | odd
    refused |= {"train.compile = true": config.train.compile}
    _refuse(
        {f"{experts} in the model's config.json, and {setting}": is_set for setting, is_set in refused.items()},
        "supported are experts on one rank, in 16 bits, not compiled, with adapters whose ranks are multiples of "
        f"{VECTOR}, on a Hopper GPU",
    )


def _refuse(refused: Mapping[str, bool], supported: str) -> None:
    for setting, is_set in refused.items():
        if is_set:
            raise UnsupportedError(f"train.cuda_graphs is true with {setting}; {supported}, or train.cuda_graphs=false")
