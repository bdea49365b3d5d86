# SPDX-License-Identifier: Apache-2.0
"""What megarl's layers have to know beside mcore's ``TransformerConfig``."""

import copy
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class PackedConfig(TransformerConfig):
    """mcore's config of a model without multi-latent attention, and what mcore has no setting for.

    Attributes:
        attention_bias: a bias on the output projection of attention (``add_qkv_bias`` is mcore's, of the other three).
        mlp_bias: a bias on the linears of dense MLPs.
        windows: for each layer of the whole model how many tokens a token attends to, itself included; None for all
            before it. Empty where no layer has a window.
        kv_copies: tensor-parallel ranks that hold the same KV head, where there are more ranks than heads;
            ``num_query_groups`` counts the copies. mcore's own way cuts q, k and v of a head anywhere over its ranks.
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    kv_copies: int = 1

    def with_bias(self, bias: bool) -> "PackedConfig":
        """The config for a module whose every linear has a bias, or has none; mcore knows one switch for all."""
        changed = copy.copy(self)
        changed.add_bias_linear = bias
        return changed
