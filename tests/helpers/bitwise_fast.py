# SPDX-License-Identifier: Apache-2.0
"""Fast versions of the operations of `numerics: bitwise`: what a trainer and an engine compute with elsewhere.

They round to bfloat16 between the steps of one operation (cos and sin, SwiGLU's gate, LoRA's product, the halves of a
linear's inputs, powers before they are summed), whatever the model's dtype is, so that few tokens suffice to notice it.
Keys are the names in ``bitwise_hooks.OPERATIONS`` for the sampler, and module and name of the function for the trainer.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from megarl.lora.layers import bitwise as lora
from megarl.lora.layers.products import add_wide


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def _split(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply the halves of K, and add the rounded products, as a product with split K may."""
    half = inputs.shape[-1] // 2
    return _rounded(inputs[..., :half] @ weight[:, :half].T) + _rounded(inputs[..., half:] @ weight[:, half:].T)


def _norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _rounded(normed).to(hidden.dtype) * weight


def _swiglu(fused: torch.Tensor) -> torch.Tensor:
    gate, up = fused.chunk(2, -1)
    return _rounded(F.silu(gate)) * up


def _rotate(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, H, D]`` by ``[T, D / 2]``."""
    first, second = states.chunk(2, -1)
    cos, sin = (_rounded(t).to(states.dtype)[:, None] for t in (angles.cos(), angles.sin()))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with the last queries ``[Q, N, D]`` to all keys ``[K, G, D]``."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))
    dtype = query.dtype
    query, key, value = (t.bfloat16().transpose(0, 1)[None] for t in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).to(dtype)


def _hook_linear(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _split(x, layer.weight)


def _hook_logits(processor: Any, head: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _rounded(hidden @ head.weight.T).float()


def _hook_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    x = x if residual is None else x + residual
    out = _norm(x, norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, x)


def _hook_rotary(embedding: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    from megarl.sampler.worker.bitwise_hooks import _frequencies

    angles = positions.float()[:, None] * _frequencies(embedding).to(query.device)
    width = embedding.head_size
    return tuple(_rotate(part.reshape(len(part), -1, width), angles).flatten(1) for part in (query, key))


def _hook_lora(
    wrapper: Any, y: torch.Tensor, x: torch.Tensor, stacked_a: Any, stacked_b: Any, scale: float, widths: Any
) -> None:
    start = 0
    for a, b, width in zip(stacked_a, stacked_b, widths, strict=True):
        y[:, start : start + width] += _rounded((x @ a[1, 0].T) @ b[1, 0].T)
        start += width


def _hook_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor, softmax_scale: float, block_table: torch.Tensor, **others: Any,
) -> None:  # fmt: skip
    for (begin, end), length, row in zip(
        pairwise(cu_seqlens_q.tolist()), seqused_k.tolist(), block_table.long(), strict=True
    ):
        pages = row[: -(-length // k.shape[1])]
        out[begin:end] = _attend(
            q[begin:end], k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length], softmax_scale
        )


def _hook_temperature(logits: torch.Tensor, index: torch.Tensor, temperature: torch.Tensor) -> None:
    logits *= (1 / temperature[index.long()]).bfloat16()[:, None]


def _hook_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, tokens) - _rounded(logits.exp()).sum(-1, keepdim=True).log()


SAMPLER: dict[str, Callable] = {
    "linear": _hook_linear,
    "logits": _hook_logits,
    "norm": _hook_norm,
    "swiglu": lambda layer, x: _swiglu(x),
    "rotary": _hook_rotary,
    "lora": _hook_lora,
    "attention": _hook_attention,
    "temperature": _hook_temperature,
    "logprobs": _hook_logprobs,
}


def _prepare_heads(
    fused: torch.Tensor, angles: torch.Tensor, weights: list[torch.Tensor], eps: float, layout: list[int]
) -> tuple[torch.Tensor, ...]:
    groups, queries, width = layout
    grouped = fused.view(len(fused), groups, queries + 2, width)
    parts = [grouped[:, :, :queries].flatten(1, 2), grouped[:, :, queries]]
    if weights:
        parts = [_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True)]
    query, key = (_rotate(part, angles[:, : width // 2]) for part in parts)
    return query, key, grouped[:, :, queries + 1]


def _attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, None]:
    runs = [_attend(query[a:b], key[a:b], value[a:b], scale) for a, b in pairwise(bounds.tolist()) if b > a]
    return torch.cat(runs), None


def _adapted_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: Any, a: torch.Tensor, b: list[torch.Tensor],
    scalings: list[float], numbers: list[int], fusion: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    low = inputs @ a.T
    return add_wide(_split(inputs, weight), low, b, lora._layout(scalings, numbers, fusion)), low


def _sums(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    powers, label_logit = _rounded(logits.exp()), logits.gather(1, labels[:, None])[:, 0]
    return torch.stack([torch.zeros_like(label_logit), label_logit, powers.sum(1), (powers * logits).sum(1)])


TRAINER: dict[str, Callable] = {
    "megarl.bitwise.linear.linear": lambda inputs, weight, bias=None: _split(inputs, weight),
    "megarl.lora.layers.bitwise._adapted_linear": _adapted_linear,
    "megarl.model.layers.bitwise.ops.rms_norm": _norm,
    "megarl.model.layers.bitwise.ops.prepare_heads": _prepare_heads,
    "megarl.model.layers.bitwise.ops.swiglu": _swiglu,
    "megarl.model.layers.bitwise.ops.attend": _attend_packed,
    "megarl.loss.chunks.bitwise_logits": lambda inputs, weight, t: _rounded(inputs @ weight.T).float() / t,
    "megarl.loss.chunks.bitwise_sums": _sums,
}
