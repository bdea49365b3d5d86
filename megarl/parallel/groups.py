# SPDX-License-Identifier: Apache-2.0
"""Make and describe process groups. Only this module reads mcore's ``parallel_state``."""

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from megarl.config import ParallelConfig
from megarl.errors import ConfigError
from megarl.parallel.device import backend
from megarl.parallel.gloo import register_gloo
from megarl.parallel.token_exchange import forget_exchanges
from megarl.parallel.topology import Topology

# Parallel axes that split weights.
Axis = Literal["tensor", "expert_tensor"]


@dataclass(frozen=True)
class Groups:
    """This rank's coordinates in the layout and its process groups.

    Attributes:
        topology: the layout.
        rank: global rank.
        tensor_rank, context_rank, data_rank, pipeline_rank: coordinates.
        expert_rank, expert_tensor_rank: coordinates in the experts' layout.
        tensor, context, data, pipeline, expert, expert_tensor: process groups along one axis.
        data_context: process group of the ranks along data and context together.
        device: device that tensors are on.
    """

    topology: Topology
    rank: int
    tensor_rank: int
    context_rank: int
    data_rank: int
    pipeline_rank: int
    expert_rank: int
    expert_tensor_rank: int
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    device: torch.device

    @property
    def first_stage(self) -> bool:
        """True if this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """True if this rank computes logprobs."""
        return self.pipeline_rank == self.topology.pipeline - 1

    def along(self, axis: Axis) -> tuple[dist.ProcessGroup, int, int]:
        """Return ``(group, this rank in it, its size)`` for an axis."""
        if axis == "tensor":
            return self.tensor, self.tensor_rank, self.topology.tensor
        return self.expert_tensor, self.expert_tensor_rank, self.topology.expert_tensor

    def last_stage_rank(self) -> int:
        """Return the global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pipeline, self.topology.pipeline - 1)


def init_groups(
    config: ParallelConfig, device: torch.device, *, seed: int = 0, timeout_seconds: float = 1800
) -> Groups:
    """Join the default process group (from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and build mcore's groups.

    Args:
        config: the layout.
        device: from ``pick_device``.
        seed: seed of mcore's random state tracker (dropout).
        timeout_seconds: seconds that a collective waits for a peer before it raises.

    Raises:
        ConfigError: the number of processes is not the layout's, or an environment variable is missing.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"environment variable {missing[0]} is not set; start with torchrun or `megarl train`")
        # Without device_id, which would connect all of mcore's groups at once; most are never used.
        dist.init_process_group(backend(device), timeout=datetime.timedelta(seconds=timeout_seconds))
    topology = Topology.from_config(config)
    if dist.get_world_size() != topology.world_size:
        raise ConfigError(
            f"{dist.get_world_size()} processes were started, but parallel.tensor ({config.tensor}) x pipeline "
            f"({config.pipeline}) x context ({config.context}) x data ({config.data}) = {topology.world_size}"
        )
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.expert_tensor,
            create_gloo_process_groups=False,
        )
        if device.type == "cuda":
            _make_host_groups(topology, datetime.timedelta(seconds=timeout_seconds))
        tensor_parallel.model_parallel_cuda_manual_seed(_dropout_seed(seed, topology, dist.get_rank()))
    return current_groups(device)


def _dropout_seed(seed: int, topology: Topology, rank: int) -> int:
    """Return a seed for mcore's random states that only TP ranks share.

    mcore gives all ranks the same default state, and each TP rank another one beside it. CP and DP ranks hold different
    tokens and pipeline stages different layers. With one seed they would all draw the same dropout masks.
    """
    # mcore adds up to a few thousand for the tensor and expert ranks, so seeds are spaced wider.
    return seed + 65_537 * (rank // topology.tensor)


def current_groups(device: torch.device | None = None) -> Groups:
    """Describe the groups that mcore was initialised with, by megarl or by a user's own script.

    Args:
        device: device that tensors are on; default: the current CUDA device, or the CPU.

    Raises:
        ConfigError: mcore's groups are not initialised.
    """
    if not mpu.model_parallel_is_initialized():
        raise ConfigError("mcore's parallel_state is not initialised; call initialize_model_parallel first")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    topology = Topology(
        tensor=mpu.get_tensor_model_parallel_world_size(),
        context=mpu.get_context_parallel_world_size(),
        data=mpu.get_data_parallel_world_size(),
        pipeline=mpu.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        expert=mpu.get_expert_model_parallel_world_size(),
        expert_tensor=mpu.get_expert_tensor_parallel_world_size(),
    )
    return Groups(
        topology=topology,
        rank=dist.get_rank(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        context_rank=mpu.get_context_parallel_rank(),
        data_rank=mpu.get_data_parallel_rank(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        expert_rank=mpu.get_expert_model_parallel_rank(),
        expert_tensor_rank=mpu.get_expert_tensor_parallel_rank(),
        tensor=mpu.get_tensor_model_parallel_group(),
        context=mpu.get_context_parallel_group(),
        data=mpu.get_data_parallel_group(),
        data_context=mpu.get_data_parallel_group(with_context_parallel=True),
        pipeline=mpu.get_pipeline_model_parallel_group(),
        expert=mpu.get_expert_model_parallel_group(),
        expert_tensor=mpu.get_expert_tensor_parallel_group(),
        device=device,
    )


# By their ranks: groups of this rank for Python objects.
_host_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _make_host_groups(topology: Topology, timeout: datetime.timedelta) -> None:
    """Make a gloo group beside each NCCL group along data and context, and along pipeline. Collective over all ranks.

    All ranks make all of them in one order: torch names a group by how many were made before.
    """
    inner, whole = topology.tensor * topology.context * topology.data, topology.world_size
    along_data = [range(stage + rank, stage + inner, topology.tensor)
                  for stage in range(0, whole, inner) for rank in range(topology.tensor)]  # fmt: skip
    along_pipeline = [range(rank, whole, inner) for rank in range(inner)]
    for ranks in [*along_data, *along_pipeline]:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend=register_gloo())
            if dist.get_rank() in ranks:
                _host_groups[tuple(ranks)] = group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for Python objects, which waits for no GPU; the same one if there is none."""
    if dist.get_backend(group) != "nccl":
        return group
    return _host_groups.get(tuple(dist.get_process_group_ranks(group)), group)


def leave_layout() -> None:
    """Destroy mcore's groups but not the default one, so that ``init_groups`` can build another layout. Collective."""
    forget_exchanges()
    while _host_groups:
        dist.destroy_process_group(_host_groups.popitem()[1])
    if mpu.model_parallel_is_initialized():
        made = mpu._global_process_group_list
        mpu.destroy_model_parallel()
        # mcore drops its groups without destroying them: their threads and sockets would stay until the process ends.
        for group in made or ():
            if group is not None:
                dist.destroy_process_group(group)


def destroy_groups() -> None:
    """Destroy all groups; safe to call twice."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_full(shard: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate a tensor's shards along ``dim`` over a group. Every rank gets the whole tensor.

    Args:
        shard: this rank's part, of the same shape on every rank.
        dim: the split dimension; None for a replicated tensor, which is returned unchanged.
        group: the tensor-parallel group.
    """
    if dim is None or group.size() == 1:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run a function on global rank 0. Every rank returns once it is done, or raises its exception. Collective.

    Args:
        action: the function; its exceptions must be picklable.
    """
    failure: list[BaseException | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failure[0] = error
    dist.broadcast_object_list(failure, 0)
    if failure[0] is not None:
        raise failure[0]
