# SPDX-License-Identifier: Apache-2.0
"""Update what one of mcore's optimizers holds tensor by tensor, where ``flat_part`` cannot."""

from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megarl.model.optimizer.fused_adamw import clip_and_step, prepare
from megarl.parallel.mcore import gradients_for_norm


class TensorPart:
    """One of mcore's optimizers as it is. One without parameters on this rank does nothing.

    Attributes:
        mcores: mcore's optimizer.
    """

    def __init__(self, mcores: Any) -> None:
        self.mcores = mcores

    @property
    def counted(self) -> list[torch.Tensor]:
        """Main weights whose gradients this rank counts in the norm, in the order of ``norms``. After ``prepare``."""
        mains = {id(main.grad): main for main in self.mcores.get_parameters()}
        return [mains[id(gradient)] for gradient in gradients_for_norm(self.mcores)]

    def places(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return nothing: no main weight is a part of another tensor."""
        return {}

    def prepare(self) -> None:
        """Give mcore's tensors their gradients."""
        if self.mcores.optimizer is not None:
            self.mcores.prepare_grads()

    def norms(self) -> torch.Tensor:
        """Return the norm of the gradient of each of ``counted``, float32. After ``prepare``."""
        gradients = gradients_for_norm(self.mcores) if self.mcores.optimizer is not None else []
        return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)

    def update(self, norm: torch.Tensor, lr: float, max_norm: float) -> None:
        """Clip and update; see ``fused_adamw.clip_and_step``."""
        if self.mcores.optimizer is None:
            return
        if isinstance(self.mcores, Float16OptimizerWithFloat16Params):
            clip_and_step(self.mcores.optimizer, norm, lr, max_norm)
            # mcore launches one copy per weight.
            for models, mains in zip(self.mcores.float16_groups, self.mcores.fp32_from_float16_groups, strict=True):
                torch._foreach_copy_(models, [main.data for main in mains])
        else:
            prepare(self.mcores.optimizer, norm, lr, max_norm)
            self.mcores.step_with_ready_grads()

    def clear(self) -> None:
        """Let go of the gradients."""
        if self.mcores.optimizer is not None:
            self.mcores.zero_grad()
