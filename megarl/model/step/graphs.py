# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a chunk's forward and backward pass: one launch each, where a small model spends its time launching.

A graph replays fixed kernels on fixed memory, so everything that changes between micro-batches is copied into its
inputs, and shapes are rounded up to few sizes: T by ``packing`` (padding is a sequence of its own), the number of
sequences by empty ones at the end, and the longest sequence, which attention takes as a number, to a power of two. In
float32, where attention runs sequence by sequence, every packing is a shape of its own; that is for comparisons, not
for speed.

The captured backward pass is of aliases of the trained parameters, and adds to mcore's gradient buffers itself: the
nodes that accumulate the parameters' own gradients belong to the stream on which DDP was built, which a capture may not
touch. Captured once more without gradients, the forward pass also serves logprobs.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import random
from torch.func import functional_call

from megarl.errors import UnsupportedError
from megarl.model.layers.attention import PackedSequences
from megarl.model.layers.gpt import inner_model
from megarl.model.step.packing import MicroBatch
from megarl.model.step.schedule import RunChunk

# Passes before a capture: libraries make their workspaces and compile their kernels in the first ones.
WARM_UP = 2
# A pack has at least room for so many sequences.
FEWEST_SEQUENCES = 16
# Sizes that T may have within a token budget, and what fast kernels ask of it.
SIZES, ALIGNED = 8, 16
# Elements of a gradient that is added together with others.
SMALL = 2**20


@dataclass
class Captured:
    """A captured shape.

    Attributes:
        tokens, positions: int64 ``[1, T]``, copied into before a replay.
        bounds: int32 ``[sequences + 1]``, likewise.
        forward, backward: the graphs; ``backward`` is None without gradients.
        hidden: ``[T, 1, hidden]``, what the forward pass gives.
        by_hidden: its gradient, copied into before the backward pass.
        where: addresses of the trained parameters, which the graphs read.
        kept: other memory that the graphs use and their pool does not hold.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None
    hidden: torch.Tensor
    by_hidden: torch.Tensor | None
    where: tuple[int, ...]
    kept: list[torch.Tensor]

    def fill(self, item: MicroBatch) -> None:
        """Copy a micro-batch into the inputs."""
        self.tokens.copy_(item.tokens_T[None])
        self.positions.copy_(item.positions_T[None])
        found = item.packed.cu_seqlens_q
        assert found is not None
        self.bounds[: len(found)] = found
        self.bounds[len(found) :] = self.tokens.shape[1]


class GraphedChunk:
    """A model chunk, wrapped in mcore's DDP, that runs micro-batches by CUDA graphs.

    One micro-batch at a time: what a forward pass returns is overwritten by the next one, so its backward pass must
    have run by then. That is so without pipeline parallelism.
    """

    def __init__(self, chunk: Any) -> None:
        self._model = inner_model(chunk)
        self._trained = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        self._adapted = [module for module in self._model.modules() if "adapters" in module._modules]
        self._captured: dict[Hashable, Captured] = {}
        self._pool: Any = None

    def __call__(self, item: MicroBatch) -> torch.Tensor:
        """The chunk's output ``[T, 1, hidden]``, valid until the next call."""
        key = self._key(item)
        captured = self._captured.get(key)
        where = tuple(parameter.data_ptr() for parameter in self._trained.values())
        if captured is None or captured.where != where:
            captured = self._captured[key] = self._capture(item, where)
        captured.fill(item)
        if captured.backward is None:
            captured.forward.replay()
            return captured.hidden
        return _Replay.apply(captured.hidden.new_zeros((), requires_grad=True), captured)

    @property
    def _exact(self) -> bool:
        return self._model.config.params_dtype is torch.float32

    def _key(self, item: MicroBatch) -> Hashable:
        """What a graph has fixed: shape, whether there are gradients, the adapter that each layer computes with."""
        shape: Hashable = item.packed.lengths
        if not self._exact:
            shape = len(item.tokens_T), _sequences(item.packed), _longest(item.packed)
        return torch.is_grad_enabled(), tuple(module.active for module in self._adapted), shape

    def _capture(self, item: MicroBatch, where: tuple[int, ...]) -> Captured:
        packed = item.packed
        if not self._exact:
            packed = packed.with_room(_sequences(packed), _longest(packed))
        tokens, positions = item.tokens_T[None].clone(), item.positions_T[None].clone()

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            leaves = {name: parameter.detach().requires_grad_() for name, parameter in self._trained.items()}
            feed = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "packed_seq_params": packed}
            return functional_call(self._model, leaves, kwargs=feed), list(leaves.values())

        by_hidden = self._warm_up(run)
        # The graphs' pool cannot use what the warm-up leaves in torch's cache.
        torch.cuda.empty_cache()
        forward, backward = torch.cuda.CUDAGraph(), None
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with _without_randomness():
            with torch.cuda.graph(forward, pool=self._pool):
                hidden, leaves = run()
            if by_hidden is not None:
                backward = torch.cuda.CUDAGraph()
                with torch.cuda.graph(backward, pool=self._pool):
                    self._add_gradients(torch.autograd.grad(hidden, leaves, by_hidden, allow_unused=True))
        bounds = packed.cu_seqlens_q
        assert bounds is not None
        kept = self._outside_the_pool()
        return Captured(tokens, positions, bounds, forward, backward, hidden.detach(), by_hidden, where, kept)

    def _outside_the_pool(self) -> list[torch.Tensor]:
        """What the warm-up left in mcore's caches, which let go of it when they grow: RoPE's table and buffers."""
        return [self._model.rope_table, *get_global_memory_buffer().buffer.values()]

    def _warm_up(self, run: Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]) -> torch.Tensor | None:
        """Run on a stream of its own, as captures do; zeros like the output where there are gradients."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        by_hidden = None
        with torch.cuda.stream(stream), _without_randomness():
            for _ in range(WARM_UP):
                hidden, leaves = run()
                if torch.is_grad_enabled():
                    by_hidden = torch.zeros_like(hidden)
                    torch.autograd.grad(hidden, leaves, by_hidden, allow_unused=True)
                del hidden, leaves
        torch.cuda.current_stream().wait_stream(stream)
        return by_hidden

    def _add_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """What mcore's hooks on the parameters do in a backward pass that is not captured.

        The small ones in few kernels: those of an adapter are hundreds, and each takes longer to start than to run.
        """
        sums, small = [], []
        for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
            if gradient is None:
                continue
            if gradient.numel() > SMALL:
                parameter.main_grad.add_(gradient)
                continue
            sums.append(parameter.main_grad)
            small.append(gradient.contiguous())
        if small:
            widened = [torch.empty_like(total) for total in sums]
            torch._foreach_copy_(widened, small)
            torch._foreach_add_(sums, widened)


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


@contextlib.contextmanager
def _without_randomness() -> Iterator[None]:
    """mcore switches random states around what might draw numbers, which a capture cannot; nothing here draws any."""
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
        # Around each switch the tracker kept what it was given for the state: nothing.
        tracker.set_states(states)


def graphed(chunks: list[Any], device: torch.device) -> RunChunk:
    """``run_chunk`` by CUDA graphs.

    Args:
        chunks: wrapped by ``wrap_ddp``; with parameters that will be trained marked so.
        device: theirs.

    Raises:
        UnsupportedError: no GPU.
    """
    if device.type != "cuda":
        raise UnsupportedError("train.cuda_graphs is true, which needs a GPU; use false on a CPU")
    [chunk] = chunks
    run = GraphedChunk(chunk)
    return lambda _, item: run(item)


def token_unit(budget: int, multiple: int) -> int:
    """What T is padded to a multiple of, so that packs within a budget have at most ``SIZES`` sizes.

    Args:
        budget: ``train.micro_batch_tokens``.
        multiple: T must be a multiple of it anyway.
    """
    step = multiple * ALIGNED
    return -(-budget // (SIZES * step)) * step


def _sequences(packed: PackedSequences) -> int:
    return max(FEWEST_SEQUENCES, _power_of_two(len(packed.lengths)))


def _longest(packed: PackedSequences) -> int:
    return min(_power_of_two(max(packed.lengths)), sum(packed.lengths))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
