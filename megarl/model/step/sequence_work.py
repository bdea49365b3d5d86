# SPDX-License-Identifier: Apache-2.0
"""How much work a sequence is, from config.json alone: attention's grows with the square of its length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SequenceWork:
    """Operations of a training step that a sequence costs, up to a factor that is the same for all.

    Attributes:
        per_token: of a fed token, in all linears.
        per_response: of a response token, in the output layer.
        per_pair: of a token and one that it attends to.
    """

    per_token: float = 1.0
    per_response: float = 0.0
    per_pair: float = 0.0

    def of(self, tokens: int, responses: int) -> float:
        """Work of a sequence that feeds ``tokens`` tokens and has ``responses`` response tokens."""
        return self.per_token * tokens + self.per_response * responses + self.per_pair * tokens * (tokens + 1) / 2


BY_TOKENS = SequenceWork()


def sequence_work(config: Mapping[str, Any]) -> SequenceWork:
    """Count what one step with frozen weights does: forward pass and the gradients of activations.

    A product of [a, b] and [b, c] takes 2abc. A linear's backward pass is one product more, that of attention's two
    products four more. Adapters, norms and routers are left out, and all layers are taken to be alike: this balances
    work, it does not measure it.

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
    """``(outputs, inputs)`` of q, k, v, o, gate, up and down of a layer; in a mixture, of what one token passes."""
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
    """Of multi-latent attention's projections (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, rank = heads * (plain + rotary), config.get("q_lora_rank")
    down = [(rank, hidden), (queries, rank)] if rank else [(queries, hidden)]
    return [*down, (latent + rotary, hidden), (heads * (plain + values), latent), (hidden, heads * values)]


def head_dim(config: Mapping[str, Any]) -> int:
    """Size of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
