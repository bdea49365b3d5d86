# SPDX-License-Identifier: Apache-2.0
"""Sort a rank's tokens by expert and put the experts' outputs together again, where each rank holds all experts.

mcore's dispatcher finds out the tokens of each expert on the host, which waits for the GPU three times per layer, and
adds up a token's outputs by atomic operations, in 16 bits and in any order. Without expert parallelism every size is
known beforehand: each token goes to as many experts. So nothing here waits, a CUDA graph can hold it, and sums are
added up in float32 and in order.

Shapes: T tokens, H hidden size, E experts, K experts of a token.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megarl.model.layers.pointwise import wants_kernels


class PackedMoELayer(MoELayer):
    """mcore's layer, with ``LocalDispatcher`` where neither tokens nor experts are divided among expert ranks."""

    token_dispatcher: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mcores = self.token_dispatcher
        if mcores.ep_size == 1 and mcores.tp_size == 1 and mcores.shared_experts is None:
            self.token_dispatcher = LocalDispatcher(self.config)


class LocalDispatcher(MoETokenDispatcher):
    """Hands a rank's tokens to its own experts. Its methods are called in their order, as mcore's are.

    Args:
        config: the model's.
    """

    def __init__(self, config: TransformerConfig) -> None:
        # Not mcore's constructor, which asks for process groups.
        self.config, self.shared_experts = config, None
        self._shape: tuple[int, ...] = ()
        self._tokens = self._places = self._counts = torch.empty(0, dtype=torch.int64)

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens sorted by expert, ``[T K, H]``, and their routing weights, ``[T K]``.

        Args:
            tokens: ``[..., H]``, T tokens.
            routing_map: bool ``[T, E]``, K of each row true.
            probs: ``[T, E]``, the routing weights.
        """
        self._shape = tuple(tokens.shape)
        chosen = self.config.moe_router_topk
        experts = _chosen(routing_map, chosen)
        order = experts.flatten().argsort(stable=True)
        self._tokens = order // chosen
        # The inverse of the order: where each choice of a token has gone.
        self._places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        self._places = self._places.view(-1, chosen)
        self._counts = routing_map.sum(dim=0)
        weights = probs.gather(1, experts).flatten().index_select(0, order)
        return _Spread.apply(tokens.reshape(-1, tokens.shape[-1]), self._tokens, self._places), weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both unchanged: every token is where its experts are."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return also each expert's number of tokens, int64 ``[E]``, on the tokens' device."""
        return hidden_states, self._counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs unchanged."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs unchanged."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's outputs, ``[..., H]``, from ``[T K, H]``."""
        return _Sum.apply(hidden_states, self._tokens, self._places).view(self._shape)


def _chosen(routing_map: torch.Tensor, count: int) -> torch.Tensor:
    """Return each token's experts in ascending order, int64 ``[T, K]``, without waiting for the device."""
    experts = routing_map.shape[1]
    ranks = torch.arange(experts, 0, -1, device=routing_map.device, dtype=torch.int32)
    return (routing_map * ranks).topk(count, dim=1).indices


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return rows of ``tokens`` in an order; ``places`` says where each token's rows have gone."""
        ctx.save_for_backward(places)
        return tokens.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _sums(gradients[0], *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows: the transpose of ``_Spread``."""
        ctx.save_for_backward(order)
        return _sums(rows, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


def _sums(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of its rows: ``[N, H], [T, K] -> [T, H]``."""
    if not wants_kernels(rows):
        return rows.index_select(0, places.flatten()).unflatten(0, places.shape).sum(dim=1)
    from megarl.model.layers.kernels.row_sums import sum_rows

    return sum_rows(rows if rows.stride(1) == 1 else rows.contiguous(), places)
