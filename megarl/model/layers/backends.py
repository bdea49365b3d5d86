# SPDX-License-Identifier: Apache-2.0
"""Choose the layers that a model is built of (``model.backend``)."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.config import ModelConfig
from megarl.errors import UnsupportedError
from megarl.model.layers.gpt import local_block_spec
from megarl.model.layers.pointwise import rotate

BlockSpec = Callable[[TransformerConfig, int | None], TransformerBlockSubmodules]


def backend_settings(model: ModelConfig, dtype: torch.dtype, device: torch.device, *, experts: bool) -> dict[str, Any]:
    """Return the ``TransformerConfig`` arguments of a back end.

    Args:
        model: the settings that name the back end.
        dtype: dtype of the weights.
        device: device that the model runs on.
        experts: whether the model has a mixture of experts.

    Raises:
        UnsupportedError: the back end cannot run on this device or in this dtype, or is not installed.
    """
    if model.numerics == "bitwise" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(f"model.numerics is 'bitwise' on a {device.type}; it needs CUDA; use 'fast'")
    if model.backend == "te":
        return _te_settings(device, experts)
    on_cuda = device.type == "cuda"
    if on_cuda and rope_utils.fused_apply_rotary_pos_emb is None:
        # mcore calls this name for Transformer Engine's kernel; megarl's takes its place where TE is not installed.
        rope_utils.fused_apply_rotary_pos_emb = rotate
    # The activation is a module of the layer's spec, which mcore enables by this flag; experts have none.
    return {"apply_rope_fusion": on_cuda, "use_te_activation_func": not experts}


def _te_settings(device: torch.device, experts: bool) -> dict[str, Any]:
    if device.type != "cuda":
        raise UnsupportedError("model.backend is 'te', which needs a GPU; use 'local' on a CPU")
    if importlib.util.find_spec("transformer_engine") is None:
        raise UnsupportedError(
            "model.backend is 'te', but Transformer Engine is not installed; install requirements/gpu-te.txt or use "
            "'local'"
        )
    # TE's RoPE kernel in its "sbhd" form takes one angle for each of the T packed tokens, as PackedGPTModel gives them.
    return {"apply_rope_fusion": True, "use_te_activation_func": not experts}


def block_spec(model: ModelConfig) -> BlockSpec:
    """Return the function that describes a transformer block of this back end."""
    if model.numerics == "bitwise":
        from megarl.model.layers.bitwise.layers import bitwise_block_spec

        return bitwise_block_spec
    if model.backend == "local":
        return local_block_spec
    from megarl.model.layers.te import te_block_spec

    return te_block_spec
