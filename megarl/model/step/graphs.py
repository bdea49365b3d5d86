# SPDX-License-Identifier: Apache-2.0
"""Capture a chunk's forward and backward pass as CUDA graphs, each replayed by one launch.

This pays for small models, which spend their time launching kernels. A graph replays fixed kernels on fixed memory, so
everything that changes between micro-batches is copied into its inputs, and shapes are rounded up to a few sizes.
``packing`` rounds T up (the padding is a sequence of its own). The number of sequences grows by empty ones at the end.
The longest sequence, which attention takes as a number, is rounded up to a power of two. In float32 attention runs
sequence by sequence, so every packing is a shape of its own; float32 is for comparisons, not for speed.

The captured backward pass differentiates with respect to aliases of the trained parameters (``aliased``) and adds to
mcore's gradient buffers itself. The nodes that accumulate the parameters' own gradients belong to the stream on which
DDP was built, and a capture may not touch that stream. Layers that are recomputed run on the aliases again. A second
capture, without gradients, serves logprobs.

Dropout draws from the default generator, whose state each replay reads and advances, as an uncaptured pass does.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import random

from megarl.errors import UnsupportedError
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.gpt import inner_model
from megarl.model.step.aliased import AliasedModel
from megarl.model.step.micro_batch import MicroBatch
from megarl.model.step.schedule import RunChunk, feed
from megarl.parallel import token_exchange
from megarl.triton_support import power_of_two

# Passes before a capture. In the first ones libraries make their workspaces and compile their kernels.
WARM_UP = 2
# Number of sizes that T may have within a token budget, and the multiple that fast kernels want T to be.
SIZES, ALIGNED = 8, 16


@dataclass
class Captured:
    """One captured shape.

    Attributes:
        inputs: the micro-batch's memory; filled before a replay.
        forward, backward: the graphs; ``backward`` is None without gradients.
        hidden: output of the forward pass, ``[T, 1, hidden]``.
        by_hidden: gradient of ``hidden``; filled before the backward pass.
        addresses: memory addresses of the trained parameters that the graphs read.
        kept: further memory that the graphs use and their pool does not hold.
        anchor: a scalar that requires a gradient, so that autograd calls the backward pass.
    """

    inputs: torch.Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None
    hidden: torch.Tensor
    by_hidden: torch.Tensor | None
    addresses: list[int]
    kept: list[torch.Tensor]
    anchor: torch.Tensor


class GraphedChunk:
    """A model chunk, wrapped in mcore's DDP, that runs micro-batches by CUDA graphs.

    Runs one micro-batch at a time: the next forward pass overwrites the output, so the backward pass must have run by
    then. That holds without pipeline parallelism.
    """

    def __init__(self, chunk: Any) -> None:
        self._model = inner_model(chunk)
        self._aliased = AliasedModel(self._model)
        self._adapted = [module for module in self._model.modules() if "adapters" in module._modules]
        self._captured: dict[Hashable, Captured] = {}
        self._pool: Any = None

    def __call__(self, item: MicroBatch) -> torch.Tensor:
        """Return the chunk's output ``[T, 1, hidden]``, valid until the next call."""
        key = self._key(item)
        captured = self._captured.get(key)
        addresses = [parameter.data_ptr() for parameter in self._aliased.trained]
        if captured is None or captured.addresses != addresses:
            with token_exchange.captured():
                captured = self._captured[key] = self._capture(item, addresses)
        captured.inputs.copy_(item.inputs.memory)
        if captured.backward is None:
            captured.forward.replay()
            return captured.hidden
        return _Replay.apply(captured.anchor, captured)

    @property
    def _exact(self) -> bool:
        return self._model.config.params_dtype is torch.float32

    def _key(self, item: MicroBatch) -> Hashable:
        """Return all that a graph fixes: the shape, the kind of pass, each layer's active adapter."""
        shape: Hashable = item.packed.lengths
        if not self._exact:
            shape = len(item.tokens_T), len(item.inputs.bounds), _longest(item.packed)
        kind = torch.is_grad_enabled(), self._model.training
        return *kind, tuple(module.active for module in self._adapted), shape

    def _capture(self, item: MicroBatch, addresses: list[int]) -> Captured:
        memory = item.inputs.memory.clone()
        tokens, positions, bounds = (
            _same_part(memory, item.inputs.memory, one) for one in (item.tokens_T, item.positions_T, item.inputs.bounds)
        )
        packed = item.packed
        if self._exact:
            packed = packed.bounded(bounds[: len(packed.lengths) + 1], max(packed.lengths))
        else:
            packed = packed.bounded(bounds, _longest(packed))
        run = partial(self._aliased.passes, feed(tokens, positions, packed))
        with _without_randomness():
            by_hidden = _warm_up(run)
            # The graphs' pool cannot use memory that the warm-up left in torch's cache.
            torch.cuda.empty_cache()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
            hidden = run(by_hidden, *(partial(torch.cuda.graph, graph, pool=self._pool) for graph in graphs))
        kept, anchor = self._outside_the_pool(), hidden.new_zeros((), requires_grad=True)
        backward = None if by_hidden is None else graphs[1]
        return Captured(memory, graphs[0], backward, hidden, by_hidden, addresses, kept, anchor)

    def _outside_the_pool(self) -> list[torch.Tensor]:
        """Return the RoPE table and mcore buffers that the graphs read; mcore drops them when they grow."""
        return [self._model.rope_table, *get_global_memory_buffer().buffer.values()]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, captured: Captured) -> torch.Tensor:
        ctx.captured = captured
        captured.forward.replay()
        return captured.hidden.view_as(captured.hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        captured = ctx.captured
        captured.by_hidden.copy_(gradients[0])
        captured.backward.replay()
        return None, None


def _warm_up(run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Run on a side stream, as captures do. Returns zeros like the output if there are gradients.

    The passes leave no trace: no gradient is added, and the random numbers are drawn again.
    """
    drawn, stream = torch.cuda.get_rng_state(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            hidden = run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_rng_state(drawn)
    return torch.zeros_like(hidden) if torch.is_grad_enabled() else None


@contextlib.contextmanager
def _without_randomness() -> Iterator[None]:
    """Disable mcore's switching of random states, which a capture cannot do.

    It switches for random numbers that differ between tensor-parallel ranks, which ``check_graphs`` refuses, and for
    recomputed ones, likewise.
    """
    kept = {name: getattr(random, name) for name in ("_get_cuda_rng_state", "_set_cuda_rng_state")}
    tracker = random.get_cuda_rng_tracker()
    states = tracker.get_states()
    for name in kept:
        setattr(random, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(random, name, function)
        # At each switch the tracker stored the result of the disabled getter, which is None.
        tracker.set_states(states)


def graphed(chunks: list[Any], device: torch.device) -> RunChunk:
    """Return a ``run_chunk`` that uses CUDA graphs.

    Args:
        chunks: chunks wrapped by ``wrap_ddp``. Parameters to be trained must already require gradients.
        device: device of the chunks.

    Raises:
        UnsupportedError: the device is not a GPU.
    """
    if device.type != "cuda":
        raise UnsupportedError("train.cuda_graphs is true, which needs a GPU; use false on a CPU")
    [chunk] = chunks
    run = GraphedChunk(chunk)
    return lambda _, item: run(item)


def token_unit(budget: int, multiple: int) -> int:
    """Return the multiple to pad T to, so that packs within a budget have at most ``SIZES`` sizes.

    Args:
        budget: ``train.micro_batch_tokens``.
        multiple: T must be a multiple of this in any case.
    """
    step = multiple * ALIGNED
    return -(-budget // (SIZES * step)) * step


def _same_part(copied: torch.Tensor, memory: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return in a copy of uint8 memory what ``part`` is in the memory."""
    start = part.data_ptr() - memory.data_ptr()
    return copied[start : start + part.nbytes].view(part.dtype)


def _longest(packed: PackedSequences) -> int:
    return min(power_of_two(max(packed.lengths)), sum(packed.lengths))
