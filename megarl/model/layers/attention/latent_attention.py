# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) for packed tokens, on mcore's linears."""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import MegatronModule, MLATransformerConfig

from megarl.model.layers.attention.core import PackedAttention, PackedSequences
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear
from megarl.model.layers.pointwise import apply_rope
from megarl.model.layers.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    traced,
)

# Epsilon of the latents' norms, whatever rms_norm_eps is: transformers leaves these norms at their class's default.
LATENT_EPS = 1e-6


class LatentAttention(MegatronModule):
    """An attention layer that replaces mcore's ``MLASelfAttention`` and keeps its names for the linears.

    mcore's layer (0.16.1) has three defects here. Each tensor-parallel rank gets the gradient of the shared rotary key
    from its own heads only, so the gradients of ``kv_a_proj_with_mqa`` and of all layers before it are silently wrong.
    It makes its own RoPE angles, for one sequence that starts at position 0. It cannot be built without Transformer
    Engine.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        norm: Callable[..., torch.nn.Module],
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        super().__init__(config)
        self.recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.group, self.context = pg_collection.tp, pg_collection.cp
        hidden, heads = config.hidden_size, config.num_attention_heads
        query_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = self._column(hidden, heads * query_dim)
        else:
            self.linear_q_down_proj = self._column(hidden, config.q_lora_rank)
            self.q_layernorm = norm(config=config, hidden_size=config.q_lora_rank, eps=LATENT_EPS)
            self.linear_q_up_proj = self._column(config.q_lora_rank, heads * query_dim)
        self.linear_kv_down_proj = self._column(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(config=config, hidden_size=config.kv_lora_rank, eps=LATENT_EPS)
        self.linear_kv_up_proj = self._column(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.core_attention = PackedAttention(config, softmax_scale=softmax_scale(config), pg_collection=pg_collection)
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.group,
        )

    def _column(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.group,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within each packed sequence.

        Args:
            hidden_states: ``[T, 1, hidden]``, under SP ``[T / TP, 1, hidden]``.
            attention_mask: not used.
            rotary_pos_emb: angles in radians, ``[T, 1, 1, qk_rope_head_dim]``.
            packed_seq_params: the bounds of the sequences.
            kwargs: further arguments that mcore's layer passes; not used.

        Returns:
            The output, shaped like ``hidden_states``, and its bias (None).
        """
        query = self._queries(hidden_states, rotary_pos_emb)
        key, value = self._keys_and_values(hidden_states, rotary_pos_emb)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            return self.core_attention(*tensors, None, packed_seq_params=packed_seq_params)

        # A traced attention keeps no weights that could be recomputed.
        if self.training and "core_attn" in self.recomputed and not traced():
            out = checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        return self.linear_proj(out)

    def _queries(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return queries ``[T, 1, heads / TP, qk_head_dim + rotary]``; the rotary part comes last."""
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            latent = self._local_tokens(self._gathered(self.linear_q_down_proj(hidden)[0]))
            query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        plain, rotary = self._split(query, self.config.qk_head_dim, self.config.qk_pos_emb_head_dim)
        return torch.cat([plain, self._rotated(rotary, angles)], dim=-1)

    def _keys_and_values(self, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[T, 1, heads / TP, qk_head_dim + rotary]`` and values ``[T, 1, heads / TP, v_head_dim]``."""
        down = self._gathered(self.linear_kv_down_proj(hidden)[0])
        latent, rotary = down.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(self._local_tokens(latent)))
        plain, value = self._split(up, self.config.qk_head_dim, self.config.v_head_dim)
        # All heads share the rotary key, so its gradient is the sum over the heads of all TP ranks.
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.group)
        rotary = self._rotated(rotary.unsqueeze(-2), angles).expand(-1, -1, plain.shape[-2], -1)
        return torch.cat([plain, rotary], dim=-1), value

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Gather all features ``[T, 1, F]`` of a column-parallel output. Each rank must return the whole gradient."""
        return gather_from_tensor_model_parallel_region(part, group=self.group)

    def _local_tokens(self, latent: torch.Tensor) -> torch.Tensor:
        """Under SP keep only this rank's tokens; the next linear gathers them again."""
        if not self.config.sequence_parallel:
            return latent
        return scatter_to_sequence_parallel_region(latent, group=self.group)

    @staticmethod
    def _split(tensor: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
        """Split each head into parts: ``[T, 1, heads * sum(sizes)]`` -> ``[T, 1, heads, size]`` each."""
        return tensor.view(*tensor.shape[:-1], -1, sum(sizes)).split(sizes, dim=-1)

    def _rotated(self, heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to pairs of neighbouring features. The result holds the pairs' first features, then their second.

        Queries and keys are reordered alike, so their products do not change.
        """
        halves = torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)
        return apply_rope(halves, angles, self.config, self.context)


def softmax_scale(config: MLATransformerConfig) -> float:
    """Factor of the attention logits: 1 / sqrt(head_dim); with YaRN times (0.1 * mscale_all_dim * ln(factor) + 1)^2."""
    factor = max(config.rotary_scaling_factor, 1.0)
    mscale = 0.1 * config.mscale_all_dim * math.log(factor) + 1.0
    return mscale**2 * (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
