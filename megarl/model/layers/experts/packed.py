# SPDX-License-Identifier: Apache-2.0
"""A rank's routed experts: mcore's, each an MLP of its own, computed together or one after the other."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from megarl.errors import UnsupportedError
from megarl.model.layers.experts.grouped import GroupedLinear, place_together, wants_groups, weighted_swiglu
from megarl.model.layers.linears import wait_for_adapters
from megarl.parallel.stacks import Groups


class PackedExperts(SequentialMLP):
    """mcore's experts, each an MLP of its own, computed together where that is possible.

    Attributes:
        compiles: True if the experts are compiled; set by ``megarl.model.step.compiled``.
        adapted: their linears that have adapters; likewise.
    """

    compiles = False
    adapted: Sequence[Any] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for linears in self._linears():
            place_together(linears)

    def train(self, mode: bool = True) -> "PackedExperts":
        """Switch only this module: nothing in an expert depends on it, and a mixture has thousands of modules."""
        self.training = mode
        return self

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map the tokens of all local experts ``[T, H]``, sorted by expert, to the same shape; the bias is None.

        Args:
            permuted_local_hidden_states: the tokens.
            tokens_per_expert: int64 ``[experts]``.
            permuted_probs: routing weight of each token, ``[T]``.

        Raises:
            UnsupportedError: a CUDA graph is captured, and each expert is computed alone, for which the host waits.
        """
        tokens = permuted_local_hidden_states
        if self.tp_group.size() == 1 and wants_groups(tokens, self.config.ffn_hidden_size):
            together = self._together(tokens, tokens_per_expert, permuted_probs)
            if together is not None:
                return together, None
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "train.cuda_graphs is true, but the experts cannot be computed together: that needs a Hopper GPU, 16 "
                "bits, no expert parallelism, and for all experts of a layer the same adapter, of a rank that is a "
                "multiple of 8; use train.cuda_graphs=false"
            )
        if not self.compiles:
            return super().forward(tokens, tokens_per_expert, permuted_probs)
        wait_for_adapters(self.adapted)
        counts = tokens_per_expert.tolist()
        parts = (torch.split(tensor, counts) for tensor in (tokens, permuted_probs))
        # torch.compile takes sizes of 0 and 1 for constants and would compile each, so those run uncompiled.
        outputs = [
            (expert if len(tokens) > 1 else expert._call_impl)(tokens, probs)[0]
            for expert, tokens, probs in zip(self.local_experts, *parts, strict=True)
        ]
        return torch.cat(outputs), None

    def expert_stacks(self) -> Iterator[Groups]:
        """Yield the matrices that one product reads, of each expert: weights, and those of adapters."""
        for linears in self._linears():
            yield [[linear.weight] for linear in linears]
            of_kind = getattr(type(linears[0]), "stacks", None)
            if of_kind and len({type(linear) for linear in linears}) == 1:
                yield from of_kind(linears)

    def _linears(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Return the first linear of each expert, and the second."""
        pairs = [(expert.linear_fc1, expert.linear_fc2) for expert in self.local_experts]
        return [first for first, _ in pairs], [second for _, second in pairs]

    def _together(self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor | None:
        """Return the output of all experts, or None if their linears cannot be computed together."""
        first, second = (GroupedLinear.of(linears) for linears in self._linears())
        if first is None or second is None:
            return None
        ends = counts.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        hidden = weighted_swiglu(first(tokens, ends), probs)
        return second(hidden, ends)
