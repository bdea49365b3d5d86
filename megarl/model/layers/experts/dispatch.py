# SPDX-License-Identifier: Apache-2.0
"""Sort a rank's tokens by expert, bring them to the ranks of their experts, and put the outputs together again.

mcore's dispatcher finds out on the host which tokens go to an expert, which waits for the GPU three times per layer,
and adds up a token's outputs by atomic operations, in 16 bits and in any order. Each token goes to as many experts, so
the sizes of what is sorted are known beforehand: here the host waits only for how many tokens travel to which rank, and
not at all where each rank holds all experts, so that a CUDA graph can hold the layer. Outputs are added up in float32
and in order.

Shapes: T tokens of this rank, H hidden size, E experts, K experts of a token; R tokens that this rank's experts get, L
experts of a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megarl.model.layers.pointwise import wants_kernels


class PackedMoELayer(MoELayer):
    """mcore's layer with a dispatcher of this module, except where expert tensor parallelism divides an expert."""

    token_dispatcher: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mcores = self.token_dispatcher
        if mcores.tp_size > 1 or mcores.shared_experts is not None:
            return
        local = mcores.ep_size == 1
        self.token_dispatcher = LocalDispatcher(self.config) if local else Exchange(self.config, mcores.ep_group)


class LocalDispatcher(MoETokenDispatcher):
    """Hands a rank's tokens to its own experts, which are all. Its methods are called in their order, as mcore's are.

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
        self._places = inverse_of(order).view(-1, chosen)  # where each choice of a token has gone
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


class Exchange(LocalDispatcher):
    """Brings tokens to the ranks of their experts, and the outputs back. Collective over the expert-parallel ranks.

    Args:
        config: the model's.
        group: the expert-parallel ranks; each holds equally many experts, in the order of the ranks.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self._group = group
        # Tokens that go to each rank, and that come from it.
        self._sent: list[int] = []
        self._received: list[int] = []
        self._order = self._inverse = torch.empty(0, dtype=torch.int64)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map ``[T K, H]`` and ``[T K]``, sorted by expert, to this rank's ``[R, H]`` and ``[R]``, sorted by rank."""
        ranks = self._group.size()
        # Row: a rank; column: an expert of this rank.
        coming = torch.empty_like(self._counts)
        dist.all_to_all_single(coming, self._counts, group=self._group)
        sums = torch.stack([self._counts, coming]).view(2, ranks, -1).sum(dim=2)
        self._sent, self._received = sums.tolist()
        coming = coming.view(ranks, -1)
        experts = torch.arange(coming.shape[1], device=coming.device).repeat(ranks)
        owners = experts.repeat_interleave(coming.flatten(), output_size=sum(self._received))
        self._order = owners.argsort(stable=True)
        self._inverse = inverse_of(self._order)
        self._counts = coming.sum(dim=0)
        return self._exchanged(hidden_states, back=False), self._exchanged(probs, back=False)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens and weights sorted by expert, and each expert's number of tokens, int64 ``[L]``."""
        rows = _Spread.apply(hidden_states, self._order, self._inverse[:, None])
        return rows, self._counts, probs.index_select(0, self._order)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sort the experts' outputs ``[R, H]`` by the rank that they go back to."""
        return _Spread.apply(hidden_states, self._inverse, self._order[:, None])

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map ``[R, H]`` to the outputs of this rank's tokens, ``[T K, H]``."""
        return self._exchanged(hidden_states, back=True)

    def _exchanged(self, rows: torch.Tensor, *, back: bool) -> torch.Tensor:
        sizes = (self._sent, self._received) if back else (self._received, self._sent)
        return all_to_all(self._group, rows, *sizes)


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 ``[N]``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


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

    return sum_rows(rows, places)
