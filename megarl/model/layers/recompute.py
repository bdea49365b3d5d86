# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation: mcore's settings for ``train.recompute``, and what a frozen embedding needs under it."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megarl.config import TrainConfig


def recompute_settings(config: TrainConfig) -> dict[str, Any]:
    """TransformerConfig's recompute fields.

    ``selective`` recomputes the core attention of every layer; ``full`` whole layers, each on its own: of every layer,
    or of the first ``recompute_layers`` of each chunk.
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


def open_to_gradients(model: GPTModel) -> None:
    """Make full recomputation train adapters on a frozen embedding.

    A recomputed layer passes gradients on only if its input asks for one. The frozen embedding's output does not, and
    all adapters behind it would get zero gradients without an error. Later pipeline stages receive inputs that do.
    """

    def ask(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    if model.config.recompute_granularity == "full" and model.pre_process:
        model.embedding.register_forward_hook(ask)
