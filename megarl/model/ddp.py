"""mcore's DistributedDataParallel around the chunks: gradient buffers, and communication that overlaps computation."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megarl.config import TrainConfig
from megarl.parallel.device import cuda_names

# Buckets per chunk when communication overlaps. mcore's default size (40 million elements) holds most whole adapters,
# and one bucket overlaps with nothing.
BUCKETS = 4


def wrap_ddp(chunks: list[Any], config: TrainConfig) -> list[DistributedDataParallel]:
    """Give each chunk mcore's gradient buffers (fp32) for its trainable parameters; DP ranks sum, not average.

    Args:
        chunks: one, or one per virtual pipeline stage, sharing one ``TransformerConfig``.
        config: ``distributed_optimizer``, ``overlap_grad_reduce`` and ``overlap_param_gather`` are used.
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
            wrapped.append(DistributedDataParallel(chunk.config, settings, chunk))
    if config.overlap_grad_reduce:
        # Without it the schedule would start the reduction in the first micro-batch.
        functions = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
    if config.overlap_param_gather:
        for chunk in wrapped:
            _wait_in_parents(chunk)
    return wrapped


def _wait_in_parents(chunk: DistributedDataParallel) -> None:
    """Let the owner of a ``ParameterDict`` wait for its parameters.

    mcore waits before the forward pass of the module that a parameter belongs to, and a ``ParameterDict``, which holds
    LoRA's matrices, has no forward pass: without this the pass would compute with the weights before the update.
    """
    wait = chunk._make_forward_pre_hook()
    for module in chunk.module.modules():
        held = [child for child in module.children() if isinstance(child, torch.nn.ParameterDict)]
        if held:
            module.register_forward_pre_hook(lambda _, __, held=held: [wait(child) for child in held] and None)


@contextlib.contextmanager
def without_reduction(chunks: list[Any]) -> Iterator[None]:
    """Only add to the gradient buffers, though reduction overlaps: further batches of this step follow."""
    config = chunks[0].config
    # The schedule would end mcore's no_sync before the last micro-batch.
    scheduled, config.no_sync_func = config.no_sync_func, None
    try:
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.no_sync_func = scheduled


def start_sums(chunks: list[Any]) -> None:
    """Where reduction overlaps: start what no backward pass has started, for mcore only waits for it."""
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            # In its first step mcore starts it, and would find it started.
            if chunk.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None and not group.is_first_batch:
                group.start_grad_sync()
