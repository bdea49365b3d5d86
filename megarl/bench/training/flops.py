# SPDX-License-Identifier: Apache-2.0
"""Count the floating-point operations that a training step needs; recomputed ones are not counted.

A product of [a, b] and [b, c] takes 2abc. Per token, a linear with O outputs and I inputs takes 2OI forward, 2OI for
the gradient of its input, and 2OI for the gradient of its weight if that is trained. In causal attention over L tokens,
each token sees (L + 1) / 2 keys on average, in two products forward (scores, values) and four backward. Norms, RoPE,
activations and the softmax are left out. In a mixture the experts that a token uses are counted, and the router.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.families import family_of
from megarl.model.layers.sequence_work import head_dim, linear_shapes
from megarl.model.weights.full_config import full_config


@dataclass(frozen=True)
class Work:
    """Operations per fed token.

    Attributes:
        lora: of a step that trains adapters.
        full: of a step that trains all weights.
        forward: of a forward pass with adapters.
    """

    lora: float
    full: float
    forward: float


@dataclass(frozen=True)
class Linear:
    """A linear that a token passes.

    Attributes:
        outputs, inputs: its sizes.
        times: number of such linears that the token passes in the layer.
        adapted: True if it has an adapter.
    """

    outputs: int
    inputs: int
    times: int = 1
    adapted: bool = True


def linears_of(config: Mapping[str, Any], layer: int) -> list[Linear]:
    """List the linears of a layer that a token passes.

    Args:
        config: parsed config.json, completed.
        layer: index of the layer.
    """
    moe, hidden = family_of(config).moe, config["hidden_size"]
    attention = [Linear(*shape) for shape in linear_shapes(config)[:-3]]
    if moe is None or not moe.sparse(config, layer):
        return attention + _mlp(config["intermediate_size"], hidden)
    inner = config[moe.inner_key]
    experts = _mlp(inner, hidden, config["num_experts_per_tok"])
    router = Linear(moe.count(config), hidden, adapted=False)
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner
    return [*attention, router, *experts, *(_mlp(shared, hidden) if shared else [])]


def _mlp(inner: int, hidden: int, times: int = 1) -> list[Linear]:
    return [Linear(inner, hidden, times), Linear(inner, hidden, times), Linear(hidden, inner, times)]


def work_per_token(config: Mapping[str, Any], *, rank: int, length: int, response: float) -> Work:
    """Count the operations of a model.

    Args:
        config: parsed config.json.
        rank: rank of the adapters, which are on all linears but routers.
        length: number of tokens in a sequence.
        response: share of the tokens whose logits are needed.
    """
    config = full_config(config)
    layers = config["num_hidden_layers"]
    passed = [linear for layer in range(layers) for linear in linears_of(config, layer)]
    linears = sum(one.times * one.outputs * one.inputs for one in passed)
    # With LoRA nothing below the first layer's q, k and v is trained, so their inputs need no gradient.
    first = sum(outputs * inputs for outputs, inputs in linear_shapes(config)[:3])
    adapters = rank * sum(one.times * (one.outputs + one.inputs) for one in passed if one.adapted)
    output = response * config["vocab_size"] * config["hidden_size"]
    attention = layers * 2 * (length + 1) / 2 * config["num_attention_heads"] * head_dim(config)
    forward = 2 * (linears + output + attention)
    return Work(
        lora=2 * forward + 2 * attention - 2 * first + 6 * adapters - 2 * rank * 3 * config["hidden_size"],
        full=3 * 2 * (linears + output) + 3 * 2 * attention,
        forward=forward + 2 * adapters,
    )
