# SPDX-License-Identifier: Apache-2.0
"""Make vLLM compute with the operations of ``model.numerics: bitwise``, which the trainer uses too (docs/bitwise.md).

vLLM's batch-invariant mode leaves its own kernels in place: cuBLAS, whose tiles depend on the batch, a norm that
differs with and without the residual, and LoRA kernels with another tile for each batch size. So every operation
between token ids and logprobs is replaced: ``OPERATIONS`` lists them. ``install`` changes classes and modules of vLLM,
before it builds the model.

Tested with vLLM 0.26 (CUDA, second model runner).
"""

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megarl.bitwise.blas import multiply
from megarl.bitwise.frequencies import inverse_frequencies, llama3_frequencies
from megarl.bitwise.kernels import logprobs, low_rank, rows
from megarl.bitwise.kernels.attention import Pages, attend
from megarl.errors import UnsupportedError

TESTED = "0.26"


def _linear(
    method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    return multiply(x.reshape(-1, x.shape[-1]), layer.weight, bias).view(*x.shape[:-1], -1)


def _logits(
    processor: Any, lm_head: torch.nn.Module, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return float32 logits: rounding them would cost more accuracy than all of the model's other operations."""
    return multiply(hidden_states, lm_head.weight, embedding_bias, torch.float32)


def _norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Normalise; with a residual, its sum with ``x`` is rounded first, as the trainer's residual stream is."""
    if residual is not None:
        x = residual = x + residual
    width = x.shape[-1]
    if x.ndim == 3:  # heads, maybe as views of a fused projection
        tokens, count = x.shape[:2]
        flat = x.as_strided((tokens, count * width), (x.stride(0), 1)) if x.stride()[1:] == (width, 1) else x.flatten(1)
        return rows.rms_norm(flat, norm.weight.data, norm.variance_epsilon, rows.Heads.of(count, width))
    out = rows.rms_norm(x, norm.weight.data, norm.variance_epsilon)
    return out if residual is None else (out, residual)


def _swiglu(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return rows.swiglu(x)


def _rotary(
    embedding: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    frequencies = embedding.__dict__.get("_megarl_frequencies")
    if frequencies is None or frequencies.device != query.device:
        frequencies = embedding.__dict__["_megarl_frequencies"] = _frequencies(embedding).to(query.device)
    angles = positions.flatten().float()[:, None] * frequencies

    def turn(states: torch.Tensor) -> torch.Tensor:
        width = embedding.head_size
        heads = rows.Heads.of(states.shape[-1] // width, width)
        return rows.rotate(states, angles, heads).flatten(1)

    return turn(query), None if key is None else turn(key)


def _frequencies(embedding: Any) -> torch.Tensor:
    """Return the frequencies of one of vLLM's rotary embeddings, as the trainer computes them.

    Raises:
        UnsupportedError: it is neither a plain one nor Llama 3's, or does not rotate the whole head in halves.
    """
    kind = type(embedding).__name__
    whole = embedding.rotary_dim == embedding.head_size and embedding.is_neox_style
    if whole and kind == "RotaryEmbedding":
        return inverse_frequencies(embedding.base, embedding.rotary_dim)
    if whole and kind == "Llama3RotaryEmbedding":
        return llama3_frequencies(
            embedding.base,
            embedding.rotary_dim,
            factor=embedding.scaling_factor,
            low=embedding.low_freq_factor,
            high=embedding.high_freq_factor,
            original=embedding.orig_max_position,
        )
    raise UnsupportedError(
        f"model.numerics is 'bitwise' with vLLM's {kind}; supported are rope_type default and llama3"
    )


def _lora(
    wrapper: Any, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...], scale: float, output_slices: tuple[int, ...], **options: Any,
) -> None:  # fmt: skip
    """Add every token's adapter to ``y`` in place. The scaling is already in B."""
    assert scale == 1.0 and options.get("add_inputs", True)
    tokens = _tokens(wrapper, len(x))
    if tokens is None:
        return
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = x.new_empty(len(x), a.shape[-2])
        low_rank.shrink(x, a.squeeze(1), tokens, low)
        low_rank.expand(low, b.squeeze(1), tokens, y, y, low_rank.Columns.of(width, start))
        start += width


def _tokens(wrapper: Any, count: int) -> low_rank.Tokens | None:
    """Return vLLM's index of a step's tokens; None if none has an adapter."""
    given = wrapper.token_mapping_meta.meta_args(count, wrapper.lora_config.specialize_active_lora)
    _, order, counts, starts, adapters, none, groups = given
    return None if none.item() else low_rank.Tokens(order, counts, starts, adapters, int(groups.item()))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor, softmax_scale: float, causal: Any, window_size: Any, block_table: torch.Tensor,
    softcap: float, **others: Any,
) -> None:  # fmt: skip
    """Attend in place of vLLM's kernel, which has the same arguments.

    Raises:
        UnsupportedError: the layer has a window, a soft cap, sinks or biases.
    """
    unknown = [name for name in ("alibi_slopes", "sinks", "output_scale") if others.get(name) is not None]
    if unknown or softcap or window_size[0] >= 0 or causal is not True or k.dtype != q.dtype:
        raise UnsupportedError(
            f"model.numerics is 'bitwise' with attention of window {window_size}, soft cap {softcap}, {unknown}, KV "
            f"cache in {k.dtype}; supported is plain causal attention with the KV cache in the model's dtype"
        )
    strides = k.stride()[:3], v.stride()[:3]
    pages = Pages(k, v, *strides, k.shape[2], block_table, seqused_k, k.shape[1])
    attend(q, pages, cu_seqlens_q, softmax_scale, out)


def _divide(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    logprobs.divide_(logits, temperature[expanded_idx_mapping.long()])


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    largest, total, _ = logprobs.row_sums(logits)
    return logits.gather(1, token_ids.long()) - (largest + total.log())[:, None]


class Operation(NamedTuple):
    """A function, and what it replaces in vLLM.

    Attributes:
        run: has the arguments of what it replaces.
        owner: a class or module of vLLM, as ``module:Class`` or ``module``.
        names: attributes of the owner.
    """

    run: Callable[..., Any]
    owner: str
    names: tuple[str, ...]


_LAYERS, _SAMPLE = "vllm.model_executor.layers", "vllm.v1.worker.gpu.sample"
_PUNICA = "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU"
_FORWARD = ("forward_cuda", "forward_native")
# Every operation with a result. tests/gpu/test_bitwise.py swaps each for a fast one and requires that it is noticed.
OPERATIONS = {
    "linear": Operation(_linear, f"{_LAYERS}.linear:UnquantizedLinearMethod", ("apply",)),
    "logits": Operation(_logits, f"{_LAYERS}.logits_processor:LogitsProcessor", ("_apply_head",)),
    "norm": Operation(_norm, f"{_LAYERS}.layernorm:RMSNorm", _FORWARD),
    "swiglu": Operation(_swiglu, f"{_LAYERS}.activation:SiluAndMul", _FORWARD),
    "rotary": Operation(_rotary, f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding", _FORWARD),
    "lora": Operation(_lora, _PUNICA, ("add_lora_linear",)),
    "attention": Operation(_attention, "vllm.v1.attention.backends.triton_attn", ("unified_attention",)),
    "temperature": Operation(_divide, f"{_SAMPLE}.states", ("apply_temperature",)),
    "logprobs": Operation(_logprobs, f"{_SAMPLE}.logprob", ("compute_token_logprobs",)),
}


def install() -> None:
    """Replace vLLM's operations.

    Raises:
        UnsupportedError: the release of vLLM is not tested, or lacks what is to be replaced.
    """
    import vllm

    if not vllm.__version__.startswith(f"{TESTED}."):
        raise UnsupportedError(
            f"model.numerics is 'bitwise' with vLLM {vllm.__version__}; supported is {TESTED} on CUDA; use 'fast'"
        )
    for operation in OPERATIONS.values():
        owner = pkgutil.resolve_name(operation.owner)
        for name in operation.names:
            if not hasattr(owner, name):
                raise UnsupportedError(
                    f"model.numerics is 'bitwise', and {operation.owner} of vLLM {vllm.__version__} has no {name}, "
                    f"which is to be replaced; supported is {TESTED} on CUDA; use 'fast'"
                )
            setattr(owner, name, operation.run)
