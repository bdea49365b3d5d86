# SPDX-License-Identifier: Apache-2.0
"""Update with AdamW (Loshchilov and Hutter, arXiv:1711.05101) without making the host wait for the device.

mcore reads the gradient's norm before it clips, and only then launches the update. The GPU idles for the 10 to 20 ms
that the host needs to launch hundreds of small matrices. Here the norm stays on the device. torch's fused AdamW reads
two values from device memory: the clipping factor, and a flag that skips the update if the norm is not finite.
"""

from typing import Any

import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

# mcore's epsilon: keeps a zero gradient finite when it is clipped.
CLIP_EPS = 1e-6


def use_fused_adamw(parts: list[Any]) -> None:
    """Replace the AdamW of mcore's optimizers (Transformer Engine's, Apex's or torch's) by torch's fused AdamW.

    Args:
        parts: mcore's optimizers, before their first update.
    """
    for part in parts:
        if part.optimizer is None:
            continue
        groups = part.optimizer.param_groups
        # With a placeholder, because the constructor refuses float32 shards, which are views of parameters.
        part.optimizer = torch.optim.AdamW([torch.zeros(1)], fused=True)
        for group in groups:
            group.update(fused=True, foreach=False)
            for key, value in part.optimizer.defaults.items():
                group.setdefault(key, value)
        part.optimizer.param_groups = groups


def update(part: Any, norm: torch.Tensor, lr: float, max_norm: float) -> None:
    """Clip and update. Leaves weights, moments and step counters as they are if the norm is not finite.

    Args:
        part: one of mcore's optimizers, with prepared gradients.
        norm: from ``GradientMeter.measure``.
        lr: learning rate.
        max_norm: ``train.max_grad_norm``; 0 for no clipping.
    """
    if part.optimizer is None:
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        clip_and_step(part.optimizer, norm, lr, max_norm)
        _round(part)
    else:
        _prepare(part.optimizer, norm, lr, max_norm)
        part.step_with_ready_grads()


def clip_and_step(adamw: torch.optim.AdamW, norm: torch.Tensor, lr: float, max_norm: float) -> None:
    """Clip and update by a fused AdamW of torch; see ``update``."""
    _prepare(adamw, norm, lr, max_norm)
    adamw.step()


def _prepare(adamw: torch.optim.AdamW, norm: torch.Tensor, lr: float, max_norm: float) -> None:
    """Give the fused AdamW the values that it reads from device memory, and the learning rate."""
    adamw.found_inf = (~norm.isfinite()).float()
    adamw.grad_scale = ((norm + CLIP_EPS) / max_norm).clamp(min=1.0) if max_norm > 0 else None
    for group in adamw.param_groups:
        group["lr"] = lr


def _round(part: Any) -> None:
    """Round the main weights into the model's bf16 weights in few launches; mcore launches one copy per weight."""
    for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        torch._foreach_copy_(models, [main.data for main in mains])
