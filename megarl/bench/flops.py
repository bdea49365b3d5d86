# SPDX-License-Identifier: Apache-2.0
"""Count the floating-point operations that a training step needs; recomputed ones are not counted.

A product of [a, b] and [b, c] takes 2abc. Per token, a linear with O outputs and I inputs takes 2OI forward, 2OI for
the gradient of its input, and 2OI for the gradient of its weight if that is trained. In causal attention over L tokens,
each token sees (L + 1) / 2 keys on average, in two products forward (scores, values) and four backward. Norms, RoPE,
activations and the softmax are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.model.step.sequence_work import head_dim, linear_shapes


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


def work_per_token(config: Mapping[str, Any], *, rank: int, length: int, response: float) -> Work:
    """Count the operations of a dense model.

    Args:
        config: parsed config.json.
        rank: rank of the adapters, which are on all linears.
        length: number of tokens in a sequence.
        response: share of the tokens whose logits are needed.
    """
    shapes = linear_shapes(config)
    layers = config["num_hidden_layers"]
    linears = layers * sum(outputs * inputs for outputs, inputs in shapes)
    # With LoRA nothing below the first layer's q, k and v is trained, so their inputs need no gradient.
    first = sum(outputs * inputs for outputs, inputs in shapes[:3])
    adapters = layers * rank * sum(outputs + inputs for outputs, inputs in shapes)
    output = response * config["vocab_size"] * config["hidden_size"]
    attention = layers * 2 * (length + 1) / 2 * config["num_attention_heads"] * head_dim(config)
    forward = 2 * (linears + output + attention)
    return Work(
        lora=2 * forward + 2 * attention - 2 * first + 6 * adapters - 2 * rank * 3 * config["hidden_size"],
        full=3 * 2 * (linears + output) + 3 * 2 * attention,
        forward=forward + 2 * adapters,
    )
