# SPDX-License-Identifier: Apache-2.0
"""Move activations between tensor-parallel regions, also inside code that torch.compile traces.

Outside a trace each function here is mcore's of the same name. torch.compile cannot trace those: they call collectives
that change their argument. Inside a trace the collectives are opaque operators of megarl (``torch.ops.megarl``), which
the compiler neither looks into nor moves across each other's results.

Shapes: T tokens, W ranks of the group. Every function takes ``group``, the ranks to communicate with.
"""

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel as mcore
from torch.distributed.distributed_c10d import _resolve_process_group

from megarl.model.layers.traced.operators import operator

Group: TypeAlias = dist.ProcessGroup


def traced() -> bool:
    """Return True inside a trace of torch.compile."""
    return torch.compiler.is_compiling()


@operator("all_reduce")
def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of ``tensor`` over the ranks of the group with this name."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve_process_group(group))
    return total


@all_reduce.register_fake
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@operator("all_gather")
def all_gather(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Concatenate the ranks' tensors ``[T, ...]``: ``[W * T, ...]``; ``size`` is W."""
    whole = tensor.new_empty(tensor.shape[0] * size, *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=_resolve_process_group(group))
    return whole


@all_gather.register_fake
def _(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape[0] * size, *tensor.shape[1:])


@operator("reduce_scatter")
def reduce_scatter(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Sum the ranks' tensors ``[W * T, ...]`` and return this rank's part ``[T, ...]``; ``size`` is W."""
    local = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    dist.reduce_scatter_tensor(local, tensor.contiguous(), group=_resolve_process_group(group))
    return local


@reduce_scatter.register_fake
def _(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.ops.megarl.all_reduce(gradients[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        return torch.ops.megarl.all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return torch.ops.megarl.all_gather(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.ops.megarl.reduce_scatter(gradients[0], ctx.group, ctx.size), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return torch.ops.megarl.reduce_scatter(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.ops.megarl.all_gather(gradients[0], ctx.group, ctx.size), None, None


class _LocalTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str, size: int, rank: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        tokens = tensor.shape[0] // size
        return tensor.narrow(0, rank * tokens, tokens).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.ops.megarl.all_gather(gradients[0], ctx.group, ctx.size), None, None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str, size: int, rank: int) -> torch.Tensor:
        ctx.size, ctx.rank = size, rank
        parts = torch.ops.megarl.all_gather(tensor[None], group, size)
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        width = gradients[0].shape[-1] // ctx.size
        return gradients[0].narrow(-1, ctx.rank * width, width).contiguous(), None, None, None


def copy_to_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``tensor``; backward sums its gradient over the group."""
    if not traced():
        return mcore.copy_to_tensor_model_parallel_region(tensor, group=group)
    return tensor if group.size() == 1 else _Copy.apply(tensor, group.group_name)


def reduce_from_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of ``tensor`` over the group; backward passes the gradient on."""
    if not traced():
        return mcore.reduce_from_tensor_model_parallel_region(tensor, group=group)
    return tensor if group.size() == 1 else _Reduce.apply(tensor, group.group_name)


def gather_from_sequence_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather all ranks' tokens, ``[T / W, ...] -> [T, ...]``; backward sums the gradient and returns this rank's."""
    if not traced():
        return mcore.gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=group)
    return tensor if group.size() == 1 else _GatherTokens.apply(tensor, group.group_name, group.size())


def reduce_scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group and keep this rank's tokens, ``[T, ...] -> [T / W, ...]``; backward gathers the gradient."""
    if not traced():
        return mcore.reduce_scatter_to_sequence_parallel_region(tensor, group=group)
    return tensor if group.size() == 1 else _ScatterSum.apply(tensor, group.group_name, group.size())


def scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Keep this rank's tokens, ``[T, ...] -> [T / W, ...]``; backward gathers the gradient."""
    if not traced():
        return mcore.scatter_to_sequence_parallel_region(tensor, group=group)
    return tensor if group.size() == 1 else _LocalTokens.apply(tensor, group.group_name, group.size(), group.rank())


def gather_from_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather all ranks' features, ``[..., F / W] -> [..., F]``; backward returns this rank's part of the gradient."""
    if not traced():
        return mcore.gather_from_tensor_model_parallel_region(tensor, group=group)
    return tensor if group.size() == 1 else _GatherFeatures.apply(tensor, group.group_name, group.size(), group.rank())
