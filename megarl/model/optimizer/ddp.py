# SPDX-License-Identifier: Apache-2.0
"""Wrap the chunks in mcore's DistributedDataParallel: gradient buffers, and communication that overlaps computation."""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megarl.config import TrainConfig
from megarl.model.optimizer.summing_ddp import SummingDDP
from megarl.parallel.device import cuda_names

# Buckets per chunk when communication overlaps computation. mcore's default size (40 million elements) puts most
# adapters into one bucket, and a single bucket overlaps with nothing.
BUCKETS = 4


def wrap_ddp(chunks: list[Any], config: TrainConfig) -> list[DistributedDataParallel]:
    """Give each chunk mcore's fp32 gradient buffers for its trainable parameters. DP ranks sum; they do not average.

    Args:
        chunks: one chunk, or one per virtual pipeline stage. They share one ``TransformerConfig``.
        config: the ``train`` section, for ``distributed_optimizer``, ``overlap_grad_reduce`` and
            ``overlap_param_gather``.

    Every parameter gets ``reduced_early``: True if mcore waits for its gradient's hook to start a reduction.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    wrapped = []
    with cuda_names():
        for chunk in chunks:
            trained = sum(parameter.numel() for parameter in chunk.parameters() if parameter.requires_grad)
            settings.bucket_size = max(1, trained // BUCKETS)
            wrapped.append(SummingDDP(chunk.config, settings, chunk))
            for parameter in chunk.parameters():
                parameter.reduced_early = config.overlap_grad_reduce
    if config.overlap_grad_reduce:
        # Without no_sync_func the schedule would start the reduction in the first micro-batch.
        functions = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


@contextlib.contextmanager
def without_reduction(chunks: list[Any]) -> Iterator[None]:
    """Accumulate into the gradient buffers without reducing them, because more batches of this step follow."""
    config = chunks[0].config
    # The schedule would leave mcore's no_sync before the last micro-batch.
    scheduled, config.no_sync_func = config.no_sync_func, None
    try:
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.no_sync_func = scheduled


def start_reductions(chunks: list[Any]) -> None:
    """With overlapped reduction, start the sums that no backward pass has started; mcore only waits for them."""
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            # In its first step mcore starts this sum itself, and fails if it is already started.
            if chunk.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None and not group.is_first_batch:
                group.start_grad_sync()
