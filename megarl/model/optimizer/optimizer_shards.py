# SPDX-License-Identifier: Apache-2.0
"""Read and write the optimizer's state by parameter, and gather the shards of the distributed optimizer.

mcore's plain optimizers hold whole parameters. Its DistributedOptimizer cuts every gradient bucket into equal flat
ranges, one per rank of the bucket's data-parallel group (data x context; expert-data for experts). The cuts ignore the
bounds of parameters, so a rank may hold all, a piece or nothing of one. mcore's own ``state_dict`` is not used: with
torch's AdamW it fails on a fresh optimizer, and on loading it gives all parameters one step counter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that this rank's optimizer holds.

    Attributes:
        main: float32 main weight: the whole parameter's, or the flat range that begins at ``start``. For a float32
            parameter it is (a view of) the parameter itself.
        owner: torch optimizer that holds the moments.
        start: first element of the flat range within the flattened parameter; None for the whole parameter.
        held: tensor by which ``owner`` knows the moments: ``main``, or what it is a view of.
        place: first element of ``main`` in ``held``.
    """

    main: torch.Tensor
    owner: torch.optim.Optimizer
    start: int | None
    held: torch.Tensor
    place: int = 0

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard of a tensor shaped like the parameter."""
        if self.start is None:
            return whole
        return whole.reshape(-1)[self.start : self.start + self.main.numel()]

    def moment(self, name: str) -> torch.Tensor:
        """Return the moment ``name``, shaped like ``main``; zeros before the first step."""
        state = self.owner.state[self.held]
        return self._part(state[name]) if name in state else torch.zeros_like(self.main.data)

    def set_state(self, steps: int, moments: dict[str, torch.Tensor]) -> None:
        """Replace the moments and the number of updates, which is that of all of ``held``."""
        state = self.owner.state[self.held]
        # One tensor per state. A shared one would be advanced once per state, and Adam would be silently wrong.
        state["step"] = torch.tensor(float(steps), device=self.main.device)
        for name, moment in moments.items():
            if name not in state:
                state[name] = torch.zeros_like(self.held.data)
            self._part(state[name]).copy_(moment)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor shaped like ``held`` that belongs to ``main``."""
        if self.held is self.main:
            return whole
        return whole[self.place : self.place + self.main.numel()].view(self.main.shape)


def parts_of(optimizer: Any) -> list[Any]:
    """Return mcore's optimizers: one, or with experts two (dense parameters and experts')."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def shards_of(optimizer: Any) -> dict[torch.nn.Parameter, Shard]:
    """Map each model parameter to this rank's shard. Parameters without a shard on this rank are left out.

    Args:
        optimizer: from ``get_megatron_optimizer``. With experts it holds two optimizers.
    """
    shards: dict[torch.nn.Parameter, Shard] = {}
    for part in parts_of(optimizer):
        if part.optimizer is None:  # no trainable parameter on this rank
            continue
        pairs = _distributed_pairs(part) if isinstance(part, DistributedOptimizer) else _plain_pairs(part)
        shards |= {parameter: Shard(main, part.optimizer, start, main) for parameter, main, start in pairs}
    return shards


def moved(
    shards: Mapping[torch.nn.Parameter, Shard], places: Mapping[int, tuple[torch.Tensor, int]]
) -> dict[torch.nn.Parameter, Shard]:
    """Return those shards whose main weights have become views: ``id(main)`` -> tensor, first element in it."""
    return {
        parameter: replace(shard, held=places[id(shard.main)][0], place=places[id(shard.main)][1])
        for parameter, shard in shards.items()
        if id(shard.main) in places
    }


def _plain_pairs(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, None]]:
    groups = zip(
        getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", []), strict=True
    )
    mains = {main: parameter for models, owns in groups for parameter, main in zip(models, owns, strict=True)}
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            yield mains.get(main, main), main, None


def _distributed_pairs(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    both = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for model_groups, main_groups in both:
        for parameters, mains in zip(model_groups, main_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, optimizer._get_model_param_range_map(parameter)["param"].start


def gather_gradients(chunks: list[Any]) -> None:
    """Fill in the gradient buffers; a reduce-scatter left each rank only its own range correct. Collective."""
    for buffer, bucket in _buckets(chunks):
        _gather(bucket.grad_data, buffer.data_parallel_group)


def gather_parts(
    chunks: list[Any], held: Mapping[torch.nn.Parameter, Shard], parts: Mapping[torch.nn.Parameter, torch.Tensor]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Assemble one float32 quantity from every rank's shards. Collective over each buffer's data-parallel group.

    Args:
        chunks: model chunks, wrapped in DDP.
        held: this rank's shards, from ``shards_of``.
        parts: this rank's part of the quantity, by parameter.

    Returns:
        A new tensor of the parameter's shape for every trainable parameter.
    """
    whole: dict[torch.nn.Parameter, torch.Tensor] = {}
    for buffer, bucket in _buckets(chunks):
        flat = torch.zeros_like(bucket.grad_data)
        starts = {parameter: buffer.param_index_map[parameter][0] - bucket.offset for parameter in bucket.params_list}
        for parameter, start in starts.items():
            if parameter in parts:
                begin = start + (held[parameter].start or 0)
                flat[begin : begin + parts[parameter].numel()] = parts[parameter]
        _gather(flat, buffer.data_parallel_group)
        whole |= {p: flat[start : start + p.numel()].view(p.shape) for p, start in starts.items()}
    return whole


def _buckets(chunks: list[Any]) -> Iterator[tuple[Any, Any]]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                yield buffer, bucket


def _gather(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather in place: every rank contributes its equal range of ``flat``."""
    if group.size() > 1:
        dist.all_gather_into_tensor(flat, flat.chunk(group.size())[group.rank()].clone(), group=group)
