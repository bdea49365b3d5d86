# SPDX-License-Identifier: Apache-2.0
"""Refuse a GPTModel that does not match its ``config.json``, from which an adapter's names and meaning follow."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megarl.errors import UnsupportedError
from megarl.families import family_of
from megarl.model.layers.attention.rope import Rope, rope_of
from megarl.model.layers.build import architecture
from megarl.model.layers.packed_config import PackedConfig
from megarl.model.weights.full_config import full_config
from megarl.parallel.groups import Groups

# Fields of TransformerConfig that decide names, shapes or the computation.
FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func", "qk_layernorm", "num_moe_experts",
    "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "layernorm_zero_centered_gamma",
)  # fmt: skip
# Biases of q/k/v, of the attention's output, of the MLP.
BIASES = ("add_qkv_bias", "attention_bias", "mlp_bias")
# Relative tolerance of inverse frequencies, which are computed in float32 by other formulas.
TOLERANCE = 1e-5


def check_match(models: Sequence[GPTModel], hf_config: Mapping[str, Any], groups: Groups) -> None:
    """Refuse a model that the config does not describe.

    Args:
        models: this rank's model chunks.
        hf_config: parsed ``config.json``.
        groups: this rank's process groups.

    Raises:
        UnsupportedError: something differs; the message names the first difference with both values.
    """
    for model in models:
        _check_heads(model, groups)
        for name, here, wanted in _differences(model, full_config(hf_config), groups):
            raise UnsupportedError(
                f"the model's {name} is {_shown(here)}, but config.json asks for {_shown(wanted)}: an adapter would be "
                "saved for another model; build the one that hf_config describes, or give the hf_config of this one"
            )


def _check_heads(model: GPTModel, groups: Groups) -> None:
    """Refuse mcore's own sharing of a KV head among ranks, which splits the parts of the fused q/k/v linear."""
    size, heads = groups.topology.tensor, model.config.num_query_groups
    if not getattr(model.config, "kv_lora_rank", None) and heads % size:
        raise UnsupportedError(
            f"the tensor-parallel size is {size}, but the model has {heads} KV heads; supported are divisors of those"
        )


def _differences(model: GPTModel, hf: Mapping[str, Any], groups: Groups) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, value here, value in config.json)`` of all differences."""
    wanted, config = architecture(hf, family_of(hf)), model.config
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    only_experts = wanted.get("num_moe_experts") and "moe_layer_freq" not in wanted
    for field in FIELDS:
        if field in defaults and not (field == "ffn_hidden_size" and only_experts):
            here, there = getattr(config, field), wanted.get(field, defaults[field])
            if field == "num_query_groups":
                here //= getattr(config, "kv_copies", 1)
            if not _same(here, there):
                yield field, here, there
    if _biases(config) != (biases := tuple(bool(wanted.get(name)) for name in BIASES)):
        yield f"biases ({', '.join(BIASES)})", _biases(config), biases
    tied = bool(hf["tie_word_embeddings"])
    if model.share_embeddings_and_output_weights != tied:
        yield "share_embeddings_and_output_weights", model.share_embeddings_and_output_weights, tied
    if model.pre_process:
        rows = model.embedding.word_embeddings.weight.shape[0] * groups.topology.tensor
        if rows < hf["vocab_size"]:
            yield "vocabulary", rows, hf["vocab_size"]
    if "kv_lora_rank" not in wanted:
        yield from _rotations(model, rope_of(hf), config.kv_channels)


def _biases(config: TransformerConfig) -> tuple[bool, ...]:
    """Return whether q/k/v, the attention's output and the MLP have biases."""
    if isinstance(config, PackedConfig):
        return tuple(getattr(config, name) for name in BIASES)
    return config.add_bias_linear or config.add_qkv_bias, config.add_bias_linear, config.add_bias_linear


def _rotations(model: GPTModel, rope: Rope, head_dim: int) -> Iterator[tuple[str, Any, Any]]:
    if model.position_embedding_type == "yarn":  # mcore's own YaRN, of the same formula
        return
    if model.position_embedding_type != "rope":
        yield "position_embedding_type", model.position_embedding_type, "rope"
        return
    wanted = rope.frequencies
    if wanted is None:
        wanted = rope.base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    here = model.rotary_pos_emb.inv_freq.detach().float().cpu()
    if here.shape != wanted.shape or not torch.allclose(here, wanted.cpu(), rtol=TOLERANCE, atol=0.0):
        yield "RoPE (rotary_base, rotary_percent, scaling)", _span(here), _span(wanted)


def _span(frequencies: torch.Tensor) -> str:
    return f"{len(frequencies)} frequencies down to {float(frequencies[-1]):.4g}"


def _same(here: Any, wanted: Any) -> bool:
    if isinstance(here, float) or isinstance(wanted, float):
        # An absent factor is 1.
        return math.isclose(1.0 if here is None else here, 1.0 if wanted is None else wanted, rel_tol=1e-6)
    return here == wanted or (not here and not wanted)


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
