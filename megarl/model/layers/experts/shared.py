# SPDX-License-Identifier: Apache-2.0
"""Experts that every token passes."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


class SharedExpertGate(torch.nn.Module):
    """The linear that scales the shared experts' output per token. Every tensor-parallel rank holds the same weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map ``[..., H]`` to ``[..., 1]``. Returns (output, None), as mcore's linears return (output, bias)."""
        return F.linear(hidden, self.weight), None


class SharedExperts(SharedExpertMLP):
    """mcore's shared experts. The gate, where there is one, is a module, so that an adapter can wrap it."""

    def __init__(self, *args: Any, gate: bool, **kwargs: Any) -> None:
        super().__init__(*args, gate=False, **kwargs)
        self.gate = SharedExpertGate(self.config) if gate else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[T, 1, H]`` to the same shape; under sequence parallelism T/TP tokens."""
        output = super().forward(hidden)
        return output if self.gate is None else output * self.gate(hidden)[0].sigmoid()
