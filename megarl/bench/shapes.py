# SPDX-License-Identifier: Apache-2.0
"""List model shapes that can be measured without a download: random weights with the sizes of published models."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model, and the batch it is measured with.

    Attributes:
        hidden, layers, heads, kv_heads, head_dim, inner, vocab: sizes of the model.
        tied: True if the output layer shares the embedding's weight.
        sequences, length: the batch.
        experts, active: of a mixture, experts of a layer and of a token; ``inner`` is then an expert's size.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    sequences: int
    length: int
    experts: int = 0
    active: int = 0

    def config(self) -> dict[str, Any]:
        """Return the shape as Hugging Face's config.json."""
        dense: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        mixture = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return (mixture if self.experts else dense) | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, True, sequences=16, length=1024),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, False, sequences=2, length=4096),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 768, 151936, False, sequences=2, length=4096, experts=128, active=8),
    "tiny-moe": Shape(64, 2, 4, 2, 32, 64, 512, False, sequences=4, length=32, experts=4, active=2),
    "tiny": Shape(64, 2, 2, 1, 32, 128, 512, True, sequences=4, length=32),
}
