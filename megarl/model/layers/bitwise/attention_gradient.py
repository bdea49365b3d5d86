# SPDX-License-Identifier: Apache-2.0
"""Gradient of packed causal attention, from what the bitwise forward pass kept. Two runs give the same bits.

On GPUs it is torch's flash attention in its deterministic form, which adds nothing atomically (Dao, arXiv:2307.08691,
algorithm 2). It takes a forward pass of any kernel: the outputs and the logsumexps say all that it needs. On a CPU,
where the layers run for tests, sequence by sequence.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarl.model.layers.attention import traced_attention
from megarl.model.layers.traced.ops import Tensors


def attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float,
) -> Tensors:  # fmt: skip
    """Return the gradients of query, key and value.

    Args:
        gradient: of the output, ``[T, N, D]``.
        query, key, value: ``[T, N, D]`` and twice ``[T, G, D]``.
        out, sums: what ``megarl.bitwise.kernels.attention.attend`` returned.
        bounds: int32 ``[S + 1]``: first token of each sequence, then T.
        longest: upper bound of the sequences' lengths.
        scale: factor of the logits.
    """
    if not query.is_cuda:
        both = torch.stack([bounds, bounds]).long()
        return traced_attention.attend_backward(gradient, query, key, value, both, scale, 0)
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), query.contiguous(), key.contiguous(), value.contiguous(), out, sums * math.log(2),
            bounds, bounds, longest, longest, 0.0, True, unused, unused[:0], scale=scale,
        )  # fmt: skip


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make torch choose kernels without atomic additions, and leave fresh memory as it is."""
    kept, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False
    # torch.use_deterministic_algorithms also sets the compiler's own switch.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(kept, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = filled
