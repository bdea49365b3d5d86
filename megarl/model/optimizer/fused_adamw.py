# SPDX-License-Identifier: Apache-2.0
"""Update with AdamW (Loshchilov and Hutter, arXiv:1711.05101) without making the host wait for the device.

mcore reads the gradient's norm before it clips, and only then launches the update. The GPU idles for the 10 to 20 ms
that the host needs to launch hundreds of small matrices. Here the norm stays on the device. torch's fused AdamW reads
two values from device memory: the clipping factor, and a flag that skips the update if the norm is not finite.
"""

from typing import Any

import torch

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


def clip_and_step(adamw: torch.optim.AdamW, norm: torch.Tensor, lr: float, max_norm: float) -> None:
    """Clip and update. Leaves weights, moments and step counters as they are if the norm is not finite.

    Args:
        adamw: torch's fused AdamW, with gradients.
        norm: from ``GradientMeter.measure``.
        lr: learning rate.
        max_norm: ``train.max_grad_norm``; 0 for no clipping.
    """
    prepare(adamw, norm, lr, max_norm)
    adamw.step()


def prepare(adamw: torch.optim.AdamW, norm: torch.Tensor, lr: float, max_norm: float) -> None:
    """Give the fused AdamW the values that it reads from device memory, and the learning rate."""
    adamw.found_inf = (~norm.isfinite()).float()
    adamw.grad_scale = ((norm + CLIP_EPS) / max_norm).clamp(min=1.0) if max_norm > 0 else None
    for group in adamw.param_groups:
        group["lr"] = lr
