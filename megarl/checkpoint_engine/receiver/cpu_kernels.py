# SPDX-License-Identifier: Apache-2.0
"""Compute LoRA on vLLM's CPU back end without copying the adapter for every token.

vLLM 0.32's torch kernels gather one A and one B per token (``weights[token_indices]``). For a prefill of some thousand
tokens that moves gigabytes in every layer. Here all tokens of an adapter share one matrix product, with the same
arithmetic in the same dtypes. Tokens without an adapter (index -1) get nothing; vLLM's kernels give them the last
slot's adapter.
"""

from collections.abc import Iterator
from typing import Any

import torch


def install() -> None:
    """Replace the kernels in vLLM's CPU wrapper. Does nothing if vLLM has no such wrapper."""
    try:
        from vllm.lora.punica_wrapper import punica_cpu
    except ImportError:
        return
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice", "sgmv_shrink", "sgmv_expand", "sgmv_expand_slice"):
        setattr(punica_cpu, name, globals()[name])


def bgmv_shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0
) -> None:
    """Compute ``output[t, :r] = scaling * inputs[t] @ weights[indices[t]].T``."""
    for rows, matrix in _by_adapter(weights, indices, output.dtype):
        output[rows, : matrix.shape[0]] = scaling * (inputs[rows].to(output.dtype) @ matrix.T)


def bgmv_expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Compute ``output[t] (+)= inputs[t] @ weights[indices[t]].T``, over the columns that both have."""
    width = min(weights.shape[-2], output.shape[1])
    bgmv_expand_slice(inputs, weights, output, indices, 0, width, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    offset: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    """Compute ``bgmv_expand`` into columns ``offset : offset + size``."""
    for rows, matrix in _by_adapter(weights, indices, output.dtype):
        part = inputs[rows].to(output.dtype) @ matrix[:size].T
        if add_inputs:
            output[rows, offset : offset + size] += part
        else:
            output[rows, offset : offset + size] = part


def sgmv_shrink(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, *metadata: Any) -> None:
    """Compute ``bgmv_shrink`` per sequence; ``metadata`` is vLLM's prefill metadata, then the scaling."""
    bgmv_shrink(inputs, weights, output, _per_token(metadata), metadata[-1])


def sgmv_expand(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, *metadata: Any) -> None:
    """Compute ``bgmv_expand`` per sequence; the last of ``metadata`` is ``add_inputs``."""
    bgmv_expand(inputs, weights, output, _per_token(metadata), metadata[-1])


def sgmv_expand_slice(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, *metadata: Any) -> None:
    """Compute ``bgmv_expand_slice`` per sequence; ``metadata`` ends with offset, size, ``add_inputs``."""
    bgmv_expand_slice(inputs, weights, output, _per_token(metadata), *metadata[-3:])


def _per_token(metadata: tuple[Any, ...]) -> torch.Tensor:
    """Return each token's adapter index from vLLM's prefill metadata (starts, lengths, indices, ...)."""
    return torch.repeat_interleave(metadata[2], metadata[1])


def _by_adapter(
    weights: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """Yield, for each adapter in use, its tokens and its matrix ``[out, in]`` in ``dtype``."""
    slots = torch.unique(indices).tolist()
    for slot in slots:
        if slot >= 0:
            rows = slice(0, len(indices)) if len(slots) == 1 else (indices == slot).nonzero()[:, 0]
            yield rows, weights[slot].squeeze(0).to(dtype)
