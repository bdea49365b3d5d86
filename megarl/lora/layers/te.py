# SPDX-License-Identifier: Apache-2.0
"""LoRA on Transformer Engine's linears.

mcore's wrappers of TE's column- and row-parallel linears behave like mcore's own and take the same adapters. The linear
with a norm in front needs its own: PEFT's adapter sees the norm's output, which only the fused layer has.
"""

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as extension

from megarl.lora.layers.parallel_linear import ColumnParallelLora

# Base classes by how the linear is split. Without Transformer Engine mcore's names for them are not classes.
_NAMES: dict[str, tuple[str, ...]] = {
    "column": ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear"),
    "row": ("TERowParallelLinear",),
    "replicated": (),
}
TE_BASES: dict[str, tuple[type, ...]] = {
    split: tuple(getattr(extension, name) for name in names) if extension.HAVE_TE else ()
    for split, names in _NAMES.items()
}


def holds_norm(base: torch.nn.Module) -> bool:
    """Whether a linear normalises its own input; only TE's have the switch that returns the norm's output."""
    return hasattr(base, "return_layernorm_output")


class NormColumnLora(ColumnParallelLora):
    """Adapter of ``TELayerNormColumnParallelLinear``, on the norm's output as the layer itself computed it.

    Under SP that output is this rank's tokens: TE also offers the gathered one, but gathering rank-r activations costs
    less, and A's gradient is then summed over TP like every other column-parallel A's.
    """

    def __init__(self, base: torch.nn.Module, *args: Any) -> None:
        super().__init__(base, *args)
        base.return_layernorm_output = True

    def forward(
        self, hidden: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Base output plus the active adapter's part; the bias passes through."""
        returned = self.base_layer(hidden, *args, **kwargs)
        if self.base_layer.te_return_bias:
            out, bias, normed = returned
        else:
            # mcore's wrapper takes whatever TE returned for the output and pairs it with an absent bias.
            (out, normed), bias = returned
        return self.adapt(self.current(), out, normed) if self.active else out, bias
