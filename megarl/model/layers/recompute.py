# SPDX-License-Identifier: Apache-2.0
"""Map ``train.recompute`` to mcore's settings, and let gradients pass a frozen embedding under full recomputation."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megarl.config import TrainConfig


def recompute_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the recompute fields of ``TransformerConfig``.

    ``selective`` recomputes the core attention of every layer. ``full`` recomputes whole layers one by one: all of
    them, or the first ``recompute_layers`` of each chunk.
    """
    if config.recompute == "none":
        return {}
    if config.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    method = "uniform" if config.recompute_layers is None else "block"
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": config.recompute_layers or 1,
    }


def require_input_gradients(model: GPTModel) -> None:
    """Make full recomputation train adapters behind a frozen embedding.

    A recomputed layer passes gradients on only if its input requires one. A frozen embedding's output does not, so all
    adapters behind it would get zero gradients without an error. Later pipeline stages receive inputs that do require
    one.
    """

    def ask(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    if model.config.recompute_granularity == "full" and model.pre_process:
        model.embedding.register_forward_hook(ask)
