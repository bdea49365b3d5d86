# SPDX-License-Identifier: Apache-2.0
"""Write tiny random Hugging Face models as folders."""

from pathlib import Path

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.verify.inputs.tiny_model import write_random

# Odd vocabulary, grouped-query attention, head_dim other than hidden / heads: a careless mapping fails on each of them.
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
# Parameters of RoPE scaled for contexts of 8 tokens, so that the scaling has an effect in sequences of 40.
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "linear": {"factor": 2.0},
}
# RoPEs whose frequencies change with the length, but not within the longest sequences here, of 128 tokens.
BY_LENGTH = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    },
}
# Multi-latent attention: query and key heads of 24 (16 without RoPE, 8 with), value heads of 12; no experts in the
# first layer.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
FAMILIES = {
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 3,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.5,
        },
    ),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def rope(kind: str) -> dict[str, object]:
    """Return ``rope_parameters`` of a kind of ``ROPES``, or of ``BY_LENGTH`` for heads of 12."""
    if kind in BY_LENGTH:
        return {"rope_type": kind, "rope_theta": 10000.0, **BY_LENGTH[kind]}
    original = {} if kind == "linear" else {"original_max_position_embeddings": 8}
    return {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind], **original}


def make_model(
    folder: Path, family: str, *, tied: bool, seed: int = 0, dtype: str = "float32", **changes: object
) -> Path:
    """Write a random model of a family (a key of ``FAMILIES``) and return its folder."""
    config_class, extra = FAMILIES[family]
    config = config_class(**{**SHAPE, **extra, "tie_word_embeddings": tied, **changes})
    return write_random(config, folder, dtype=dtype, seed=seed)
