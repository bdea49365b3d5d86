# SPDX-License-Identifier: Apache-2.0
"""Adapt Transformer Engine's linears.

mcore's wrappers of TE's column- and row-parallel linears behave like mcore's own linears and take the same adapters.
The linear with a norm in front needs its own adapter: in PEFT the adapter's input is the norm's output, which only the
fused layer has.
"""

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as extension

from megarl.lora.layers.parallel_linear import ColumnParallelLora

# Base classes, by how the linear is split. Without Transformer Engine these names of mcore are not classes.
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
    """Return True if a linear normalises its own input. Only TE's have the switch that returns the norm's output."""
    return hasattr(base, "return_layernorm_output")


class NormColumnLora(ColumnParallelLora):
    """Adapter of ``TELayerNormColumnParallelLinear``, applied to the norm's output that the layer computed.

    Under SP that output holds this rank's tokens. TE can also return the gathered one, but gathering rank-r activations
    costs less, and A's gradient is then summed over TP as in every column-parallel adapter.
    """

    def __init__(self, base: torch.nn.Module, *args: Any) -> None:
        super().__init__(base, *args)
        base.return_layernorm_output = True

    def forward(
        self, hidden: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base output plus the active adapter's part, and the base's bias unchanged."""
        returned = self.base_layer(hidden, *args, **kwargs)
        if self.base_layer.te_return_bias:
            out, bias, normed = returned
        else:
            # mcore's wrapper takes all that TE returned as the output, and pairs it with an absent bias.
            (out, normed), bias = returned
        return self.adapt(self.current(), out, normed) if self.active else out, bias
