# SPDX-License-Identifier: Apache-2.0
"""Extend mcore's ``TransformerConfig`` by the settings that megarl's layers need and mcore lacks."""

import copy
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class PackedConfig(TransformerConfig):
    """Config of a model without multi-latent attention: mcore's settings, and those that mcore does not have.

    Attributes:
        attention_bias: True if the output projection of attention has a bias (mcore's ``add_qkv_bias`` is for q, k and
            v).
        mlp_bias: True if the linears of dense MLPs have biases.
        windows: for each layer of the whole model, how many tokens a token attends to, itself included; None for all
            before it. Empty if no layer has a window.
        kv_copies: number of tensor-parallel ranks that hold the same KV head, where there are more ranks than heads.
            ``num_query_groups`` counts the copies. mcore's own method splits q, k and v of one head over its ranks.
        bitwise: True with ``model.numerics: bitwise``.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    kv_copies: int = 1
    bitwise: bool = False

    def with_bias(self, bias: bool) -> "PackedConfig":
        """A copy in which all linears of a module have a bias, or none has; mcore has one switch for all of them."""
        changed = copy.copy(self)
        changed.add_bias_linear = bias
        return changed
