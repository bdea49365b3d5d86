# SPDX-License-Identifier: Apache-2.0
"""Estimate the work of a sequence from config.json, to balance micro-batches. Attention's grows with length squared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SequenceWork:
    """Operations of a training step that a sequence costs, up to a factor common to all sequences.

    Attributes:
        per_token: cost of one fed token in all linears.
        per_response: cost of one response token in the output layer.
        per_pair: cost of one pair of a token and a token that it attends to.
    """

    per_token: float = 1.0
    per_response: float = 0.0
    per_pair: float = 0.0

    def of(self, tokens: int, responses: int) -> float:
        """Return the work of a sequence that feeds ``tokens`` tokens and has ``responses`` response tokens."""
        return self.per_token * tokens + self.per_response * responses + self.per_pair * tokens * (tokens + 1) / 2


BY_TOKENS = SequenceWork()


def sequence_work(config: Mapping[str, Any]) -> SequenceWork:
    """Count the operations of one step with frozen weights: forward pass and gradients of activations.

    A product of [a, b] and [b, c] takes 2abc. The backward pass of a linear is one more product; that of attention's
    two products is four more. Adapters, norms and routers are left out, and all layers count as alike: the result
    balances work, it does not measure it.

    Args:
        config: parsed config.json.
    """
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    queries, values = head_dim(config), head_dim(config)
    if config.get("kv_lora_rank"):
        queries, values = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    linears = sum(outputs * inputs for outputs, inputs in linear_shapes(config))
    return SequenceWork(
        per_token=2 * 2 * layers * linears,
        per_response=2 * 2 * config["vocab_size"] * hidden,
        per_pair=3 * 2 * layers * config["num_attention_heads"] * (queries + values),
    )


def linear_shapes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """``(outputs, inputs)`` of a layer's q, k, v, o, gate, up, down; in a mixture, of the experts one token uses."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = config["intermediate_size"]
    if config.get("num_experts_per_tok"):
        active = config["num_experts_per_tok"] + (config.get("n_shared_experts") or 0)
        inner = active * (config.get("moe_intermediate_size") or inner)
        inner += config.get("shared_expert_intermediate_size") or 0
    mlp = [(inner, hidden), (inner, hidden), (hidden, inner)]
    if config.get("kv_lora_rank"):
        return _latent_shapes(config) + mlp
    queries = heads * head_dim(config)
    keys = (config.get("num_key_value_heads") or heads) * head_dim(config)
    return [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), *mlp]


def _latent_shapes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """``(outputs, inputs)`` of multi-latent attention's projections (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, rank = heads * (plain + rotary), config.get("q_lora_rank")
    down = [(rank, hidden), (queries, rank)] if rank else [(queries, hidden)]
    return [*down, (latent + rotary, hidden), (heads * (plain + values), latent), (hidden, heads * values)]


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
