# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences by torch's variable-length flash attention, which needs CUDA and 16-bit inputs."""

import inspect
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from megarl.model.layers.regions import traced

# What this release of torch can do. Looked up here, because torch.compile cannot trace it.
_SETTINGS = frozenset(inspect.signature(varlen_attn).parameters)
HAS_WINDOWS, HAS_GROUPS = "window_size" in _SETTINGS, "enable_gqa" in _SETTINGS
# From this compute capability on torch takes cuDNN's kernel, which wants a key and a value for each query head.
CUDNN_CAPABILITY = 10


class Bounds(Protocol):
    """Bounds of the sequences: cumulated lengths, int32 ``[sequences + 1]``, and upper bounds of the lengths."""

    @property
    def query_bounds(self) -> torch.Tensor | None: ...

    @property
    def key_bounds(self) -> torch.Tensor | None: ...

    @property
    def longest_query(self) -> int: ...

    @property
    def longest_key(self) -> int: ...


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Bounds,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend sequence by sequence; arguments as ``core.attend_runs`` has them. torch.compile can trace it.

    Where a sequence has more keys than queries, its causal mask is aligned to the lower right: query i sees keys up to
    i + keys - queries (``col_idx_limit_right`` in torch's aten/src/ATen/native/transformers/cuda/flash_attn/mask.h).
    That holds for ``is_causal`` and for the window (-1, 0).
    """
    # The kernel needs one head_dim for query, key and value, a multiple of 8. Zeros added to queries and keys do not
    # change the logits; zeros added to the values stay zeros in the output and are cut off.
    width, scale = value.shape[-1], query.shape[-1] ** -0.5 if scale is None else scale
    head_dim = -(-query.shape[-1] // 8) * 8
    query, key, value = (_pad_last(tensor, head_dim).contiguous() for tensor in (query, key, value))
    before = -1 if window is None else window - 1
    if not traced() and _shares_keys():
        return _attend_flash(query, key, value, packed, scale, before)[..., :width]
    options: dict[str, Any] = {"window_size": (before, 0)} if HAS_WINDOWS else {"is_causal": True}
    if _shares_keys():
        # torch's flash attention reads shared keys and values; torch 2.11 has no setting for it.
        options |= {"enable_gqa": True} if HAS_GROUPS else {}
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    result = varlen_attn(
        query,
        key,
        value,
        packed.query_bounds,
        packed.key_bounds,
        packed.longest_query,
        packed.longest_key,
        scale=scale,
        **options,
    )
    return (result[0] if isinstance(result, tuple) else result)[..., :width]


def _attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Bounds, scale: float, before: int
) -> torch.Tensor:
    """Call the kernel that ``varlen_attn`` calls, with autograd in C++; around its operator torch runs Python twice."""
    bounds = packed.query_bounds, packed.key_bounds, packed.longest_query, packed.longest_key
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, 0.0, before < 0, False, scale=scale, window_size_left=before, window_size_right=0
    )[0]


@torch.compiler.assume_constant_result
def _shares_keys() -> bool:
    """Return True if the kernel for this GPU lets query heads share keys and values."""
    return torch.cuda.get_device_capability()[0] < CUDNN_CAPABILITY


def _pad_last(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension with zeros to ``size``."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
