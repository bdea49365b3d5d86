"""Core attention over packed sequences for mcore linears: SDPA on a CPU, variable-length flash attention on CUDA."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

# Neither "sbhd" nor "thd": mcore then applies RoPE from per-token angles (PackedGPTModel prepares them), which needs
# no loop over the sequences of a pack.
PACKED_FORMAT = "packed"


@dataclass
class PackedSequences(PackedSeqParams):
    """mcore's record with what SDPA wants: the lengths on the host, so that no layer waits for the device."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> "PackedSequences":
        """Describe sequences of these lengths that lie one after the other."""
        bounds = torch.tensor((0, *lengths)).cumsum(0).to(device=device, dtype=torch.int32)
        longest = max(lengths)
        return cls(
            qkv_format=PACKED_FORMAT,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
        )


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence; mcore's ``core_attention`` for the ``local`` back end.

    Takes query ``[T, 1, heads, head_dim]`` and key and value ``[T, 1, kv_heads, head_dim]``, returns
    ``[T, 1, heads * head_dim]``.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; ``attention_mask`` is not used, the mask follows from ``packed_seq_params``."""
        attend = _attend_varlen if query.is_cuda and query.dtype != torch.float32 else _attend_each
        out = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params, self.softmax_scale)
        return out.reshape(out.shape[0], 1, -1)


def _attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, scale: float | None
) -> torch.Tensor:
    """One SDPA call per sequence: no mask and no work across sequences."""
    parts = [tensor.transpose(0, 1).split(packed.lengths, dim=1) for tensor in (query, key, value)]
    outs = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)[0]
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


def _attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, scale: float | None
) -> torch.Tensor:
    """torch's variable-length flash attention; needs CUDA and 16-bit inputs."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:  # torch 2.11
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    result = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        scale=scale,
        **options,
    )
    return result[0] if isinstance(result, tuple) else result
