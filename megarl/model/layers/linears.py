# SPDX-License-Identifier: Apache-2.0
"""mcore's column- and row-parallel linears, with a forward pass that torch.compile can trace.

Outside a trace they are mcore's own. mcore's forward pass waits on asynchronous collectives inside autograd functions,
where a trace would break.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as mcore

from megarl.model.layers import regions

Output = tuple[torch.Tensor, torch.Tensor | None]


class ColumnParallelLinear(mcore.ColumnParallelLinear):
    """A linear whose outputs are split over tensor-parallel ranks."""

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Output:
        """Map ``[T, 1, I]`` (T/TP tokens under SP) to ``[T, 1, O / TP]``; the second result is a bias not yet added."""
        if not regions.traced() or args or kwargs:
            return super().forward(input_, *args, **kwargs)
        hidden = input_
        if self.sequence_parallel and not self.explicit_expert_comm:
            hidden = regions.gather_from_sequence_parallel_region(input_, group=self.tp_group)
        elif not (self.explicit_expert_comm or self.disable_grad_reduce):
            hidden = regions.copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        added, left = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        return F.linear(hidden, self.weight, added), left


class RowParallelLinear(mcore.RowParallelLinear):
    """A linear whose inputs are split over tensor-parallel ranks."""

    def forward(self, input_: torch.Tensor) -> Output:
        """Map ``[T, 1, I / TP]`` to ``[T, 1, O]`` (T/TP tokens under SP); the second result is a bias not yet added."""
        if not regions.traced():
            return super().forward(input_)
        out = F.linear(input_, self.weight)
        if self.sequence_parallel and not self.explicit_expert_comm:
            out = regions.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif not self.explicit_expert_comm:
            out = regions.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


def wait_for_adapters(linears: Iterable[Any]) -> None:
    """Let the active adapters of linears wait for their updated weights; a compiled trace cannot contain that."""
    for linear in linears:
        if linear.active:
            linear.adapters[linear.active].wait()
