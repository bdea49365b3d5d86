# SPDX-License-Identifier: Apache-2.0
"""mcore's GPTModel for packed tokens, and the block specification of the ``local`` back end."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.model.layers.attention.core import PACKED_FORMAT, PackedAttention
from megarl.model.layers.block import Parts, block_of
from megarl.model.layers.experts.spec import release_graphs
from megarl.model.layers.linears import ColumnParallelLinear, RowParallelLinear
from megarl.model.layers.pointwise import SwiGLU, rms_norm, wants_kernels
from megarl.model.layers.regions import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megarl.model.layers.updates import Update
from megarl.parallel.mcore import without_class_warnings


class RMSNorm(torch.nn.Module):
    """Root mean square norm. mcore's own torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        if self.weight.requires_grad or not wants_kernels(hidden):
            return rms_norm(hidden, self.weight, self.eps)
        from megarl.model.layers.kernels import norm

        return norm.rms_norm(hidden, self.weight, self.eps)

    def beside(
        self, hidden: torch.Tensor, matrix: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the norm of ``hidden``, ``hidden`` for the residual stream, and the norm's product with A, or None.

        One kernel computes the norm's gradient and adds the residual stream's, and what comes through A.

        Args:
            hidden: ``[..., H]``.
            matrix: every A of the linear behind the norm, ``[R, H]``; None for no product.
        """
        if self.weight.requires_grad or not wants_kernels(hidden):
            return self(hidden), hidden, None
        from megarl.model.layers.kernels import adapted_norm, norm, through_gradients

        if matrix is None or not through_gradients.takes(matrix.shape[0]):
            return *norm.rms_norm_beside(hidden, self.weight, self.eps), None
        normed, low, hidden = adapted_norm.rms_norm_projected(hidden, self.weight, self.eps, matrix)
        return normed, hidden, low

    def beside_sum(
        self, residual: torch.Tensor, states: torch.Tensor, update: Update, matrix: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what ``beside`` does for the sum of the residual stream, a linear's output and its update."""
        from megarl.model.layers.kernels import adapted_norm, through_gradients
        from megarl.model.layers.kernels.residual import add_adapted

        if self.weight.requires_grad or matrix is None or not through_gradients.takes(matrix.shape[0]):
            return self.beside(add_adapted(residual, states, update), matrix)
        normed, low, hidden = adapted_norm.add_and_norm(residual, states, update, self.weight, self.eps, matrix)
        return normed, hidden, low


def local_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a block made of mcore's linears, megarl's norm and megarl's packed attention."""
    parts = Parts(RMSNorm, ColumnParallelLinear, RowParallelLinear, PackedAttention, SwiGLU)
    return block_of(parts, config, vp_stage)


class PackedGPTModel(GPTModel):
    """A GPTModel whose forward takes packed tokens and returns hidden states instead of logits.

    ``forward(input_ids [1, T], position_ids [1, T], None, packed_seq_params=PackedSequences)`` returns the final hidden
    states on the last stage: ``[T, 1, hidden]``, ``[T / TP, 1, hidden]`` under SP. Under context parallelism T counts
    this rank's tokens. ``megarl.loss.logprobs`` computes the logits, and never holds all of them at once.

    Attributes:
        rope_table: float32 radians per position of the last forward pass, ``[longest, 1, 1, rotated]``; None without
            RoPE.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with without_class_warnings():
            super().__init__(*args, **kwargs)
        if hasattr(self, "rotary_pos_emb"):
            # mcore would split the table over CP ranks for one sequence; _preprocess needs the whole table.
            self.rotary_pos_emb.cp_group = None
        release_graphs(self)

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple:
        """Replace mcore's RoPE table by one angle per packed token, so that no layer loops over sequences."""
        outputs = super()._preprocess(*args, **kwargs)
        self.rope_table = outputs[1]
        if kwargs["packed_seq_params"].qkv_format != PACKED_FORMAT or outputs[1] is None:
            return outputs
        angles = outputs[1].index_select(0, kwargs["position_ids"].view(-1))
        return (outputs[0], angles, *outputs[2:])

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states; the output layer is skipped."""
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output projection, ``[padded_vocab / TP, hidden]``."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def output_deltas(
        self, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the terms that adapters add to the logits at ``positions [R]``: factors ``([R, r], [V/TP, r])``."""
        deltas = getattr(self.output_layer, "deltas", None)
        return deltas(hidden_states, positions) if deltas else []

    def tokens_hidden(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return hidden states ``[T, hidden]`` of all tokens on every TP rank; backward sums their gradient over TP."""
        hidden = hidden_states.squeeze(1)
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group)


def inner_model(chunk: Any) -> PackedGPTModel:
    """Return the model inside a chunk that may be wrapped in DDP."""
    while not isinstance(chunk, PackedGPTModel):
        chunk = chunk.module
    return chunk
