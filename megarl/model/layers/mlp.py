# SPDX-License-Identifier: Apache-2.0
"""Gated MLP of dense layers."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP

from megarl.model.layers import pointwise
from megarl.model.layers.packed_config import PackedConfig
from megarl.model.layers.regions import traced
from megarl.model.layers.updates import Outcome, Update, apart, projection


class PackedMLP(MLP):
    """mcore's MLP. On CUDA, in 16 bits and without biases, its activation is one Triton kernel.

    Attributes:
        leaves_updates: True if the layer adds the update of ``linear_fc2``; set by the layer.
    """

    leaves_updates = False

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        self.biased = isinstance(config, PackedConfig) and config.mlp_bias
        super().__init__(config.with_bias(True) if self.biased else config, *args, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Return ``[T, 1, hidden]`` (T/TP tokens under SP) and the bias or update that is still to be added.

        ``low`` is the product of ``hidden_states`` and ``projection``, where that is not None.
        """
        if traced() and per_token_scale is None:
            fused, bias = self.linear_fc1(hidden_states)
            fused = fused if bias is None else fused + bias
            return self.linear_fc2(self._activate(fused))
        if self.biased or per_token_scale is not None or not pointwise.wants_kernels(hidden_states):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        if self.leaves_updates:
            return self._adapted(hidden_states, low)
        fused, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self._activate(fused))

    def projection(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return every A of ``linear_fc1``, ``[R, H]``, if ``forward`` takes the product of its input with them."""
        takes = self.leaves_updates and not self.biased and pointwise.wants_kernels(hidden)
        return projection(self.linear_fc1) if takes else None

    def _adapted(self, hidden: torch.Tensor, low: torch.Tensor | None) -> Outcome:
        """Return what ``forward`` does, with all that adapters add to the wide activations left to SwiGLU's kernel."""
        (fused, update), matrix = apart(self.linear_fc1, hidden, low), projection(self.linear_fc2)
        if update is None and matrix is None:
            return apart(self.linear_fc2, self._activate(fused))
        from megarl.model.layers.kernels.adapted_swiglu import adapted_swiglu

        assert update is None or isinstance(update, Update)  # without biases
        # The kernel adds what comes back through A itself.
        return apart(self.linear_fc2, *adapted_swiglu(fused, update, matrix), through=False)

    def _activate(self, fused: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) * up``, by megarl's kernel where there is one."""
        if not pointwise.has_kernels(fused):
            return pointwise.swiglu(fused)
        if traced():
            return torch.ops.megarl.swiglu(fused)
        from megarl.model.layers.kernels.swiglu import swiglu

        return swiglu(fused)
