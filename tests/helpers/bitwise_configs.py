# SPDX-License-Identifier: Apache-2.0
"""Models for the checks of bitwise layers: with norms of heads and tied embeddings, and with Llama 3's RoPE."""

from typing import Any

from transformers import LlamaConfig, Qwen3Config

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 416, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def configs(sizes: dict[str, int]) -> dict[str, Any]:
    """Return a config of each kind, by family."""
    qwen3 = Qwen3Config(**sizes, tie_word_embeddings=True)
    return {"qwen3": qwen3, "llama": LlamaConfig(**sizes, rope_parameters=LLAMA3, tie_word_embeddings=False)}
