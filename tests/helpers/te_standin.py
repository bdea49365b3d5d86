# SPDX-License-Identifier: Apache-2.0
"""A linear with a norm in front that returns on a CPU what mcore's wrapper of Transformer Engine's linear returns."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.model.layers.attention.core import PackedAttention
from megarl.model.layers.block import Parts, block_of
from megarl.model.layers.gpt import RMSNorm
from megarl.model.layers.pointwise import SwiGLU


class NormColumnStandIn(ColumnParallelLinear):
    """``TELayerNormColumnParallelLinear`` of mcore 0.16.1 over ``LayerNormLinear`` of Transformer Engine 2.12.

    TE returns ``out``, or ``(out, normed)`` with ``return_layernorm_output``; with ``return_bias`` the bias comes
    second. mcore's wrapper passes this on with ``return_bias``, and otherwise pairs all of it with None.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon
        self.return_layernorm_output = False
        self.te_return_bias = kwargs["skip_bias_add"] and kwargs["bias"]

    def forward(self, hidden: torch.Tensor) -> Any:
        """Return what mcore's wrapper returns. The norm's output holds this rank's tokens, under SP too."""
        normed = F.rms_norm(hidden, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        out, bias = super().forward(normed)
        returned = (out, bias) if self.te_return_bias else (out,)
        if self.return_layernorm_output:
            returned = (*returned, normed)
        if self.te_return_bias:
            return returned
        return (returned if len(returned) > 1 else out), None


def standin_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the block of the ``te`` back end, made of stand-ins."""
    parts = Parts(RMSNorm, NormColumnStandIn, RowParallelLinear, PackedAttention, SwiGLU, fused_norm=True)
    return block_of(parts, config, vp_stage)
