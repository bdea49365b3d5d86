"""The gated MLP of dense layers."""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from megarl.model.pointwise import wants_kernels
from megarl.model.spare import offer, wanted_by


class PackedMLP(MLP):
    """mcore's layer; on CUDA in 16 bits its activation is one kernel, which leaves room for LoRA."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, hidden] -> [T, 1, hidden]`` (T/TP under SP), and the bias to be added, None."""
        if per_token_scale is not None or not wants_kernels(hidden_states):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        from megarl.model.kernels.swiglu import swiglu

        fused, _ = self.linear_fc1(hidden_states)
        columns = wanted_by(self.linear_fc2, fused)
        return self.linear_fc2(offer(swiglu(fused, columns), columns))
