# SPDX-License-Identifier: Apache-2.0
"""Dropout of adapters' inputs; in code that torch.compile traces it drops the same elements as in uncompiled code.

Compiled kernels draw random numbers of their own, from other generators than mcore's. So dropout is an operator that
the compiler does not look into. It draws from the same generators in the same order as ``F.dropout``, recomputation
included.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megarl.model.layers.regions import traced
from megarl.model.layers.traced.operators import operator


@operator("dropout", tags=(torch.Tag.nondeterministic_seeded,))
def dropout(hidden: torch.Tensor, probability: float, tracked: bool, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``hidden`` with elements dropped and the rest scaled, and the mask of those kept, bool, same shape.

    Args:
        hidden: any shape.
        probability: of dropping an element.
        tracked: True to draw from mcore's tracker, which differs between tensor-parallel ranks; False to draw from the
            default generator, which is the same on them.
        place: number of the call within the trace. The compiler takes two calls with the same arguments for one.
    """
    if not tracked:
        return torch.native_dropout(hidden, probability, True)
    with get_cuda_rng_tracker().fork():
        return torch.native_dropout(hidden, probability, True)


@dropout.register_fake
def _(hidden: torch.Tensor, probability: float, tracked: bool, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), torch.empty_like(hidden, dtype=torch.bool)


def _save(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.scale = 1.0 / (1.0 - inputs[1]) if inputs[1] < 1.0 else 0.0
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
    (kept,) = ctx.saved_tensors
    return gradient * kept * ctx.scale, None, None, None


dropout.register_autograd(_differentiate, setup_context=_save)


def drop_inputs(layer: Any, probability: float, hidden: torch.Tensor) -> torch.Tensor:
    """Apply dropout to the input of an adapter of ``layer``, a ``ParallelLoraLinear``.

    TP ranks that hold the same tokens and features must drop the same ones. They use the default generator, which mcore
    seeds alike on TP ranks. Ranks that hold different ones use mcore's tracker. A single rank uses the default one, the
    only one that a CUDA graph can draw from.
    """
    if not (layer.training and probability > 0.0):
        return hidden
    own = layer.group.size() > 1 and (layer.splits_inputs or layer.base_layer.sequence_parallel)
    if traced():
        return torch.ops.megarl.dropout(hidden, probability, own, layer.place)[0]
    if not own:
        return F.dropout(hidden, probability)
    with get_cuda_rng_tracker().fork():
        return F.dropout(hidden, probability)
