# SPDX-License-Identifier: Apache-2.0
"""``model.backend``: which layers a model is built of."""

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
    """``TransformerConfig`` arguments of a back end.

    Args:
        model: names the back end.
        dtype: of the weights.
        device: where the model will be.
        experts: whether the model has a mixture of experts.

    Raises:
        UnsupportedError: it cannot run on this device, in this dtype, or is not installed.
    """
    if model.backend == "te":
        return _te_settings(dtype, device, experts)
    on_cuda = device.type == "cuda"
    if on_cuda and rope_utils.fused_apply_rotary_pos_emb is None:
        # Where Transformer Engine's kernel would be if it were installed.
        rope_utils.fused_apply_rotary_pos_emb = rotate
    # mcore's name for an activation that is a module of the layer's spec; those of its experts are not.
    return {"apply_rope_fusion": on_cuda, "use_te_activation_func": not experts}


def _te_settings(dtype: torch.dtype, device: torch.device, experts: bool) -> dict[str, Any]:
    if device.type != "cuda":
        raise UnsupportedError("model.backend is 'te', which needs a GPU; use 'local' on a CPU")
    if importlib.util.find_spec("transformer_engine") is None:
        raise UnsupportedError(
            "model.backend is 'te', but Transformer Engine is not installed; install requirements/gpu-te.txt or use "
            "'local'"
        )
    # Its calls ask for CUBLAS_COMPUTE_32F_FAST_TF32 (transformer_engine/common/gemm/cublaslt_gemm.cu), whatever torch's
    # own switches say; only this variable, read when CUDA's libraries start, overrules it.
    if dtype is torch.float32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        raise UnsupportedError(
            "model.dtype is 'float32' with model.backend 'te': Transformer Engine multiplies float32 matrices in TF32, "
            "10 bits of mantissa; set NVIDIA_TF32_OVERRIDE=0 in the environment, or use 'bfloat16' or backend 'local'"
        )
    # RoPE: TE's kernel in its "sbhd" form takes angles for each of the T packed tokens, as PackedGPTModel gives them.
    return {"apply_rope_fusion": True, "use_te_activation_func": not experts}


def block_spec(model: ModelConfig) -> BlockSpec:
    """The function that describes a transformer block of this back end."""
    if model.backend == "local":
        return local_block_spec
    from megarl.model.layers.te import te_block_spec

    return te_block_spec
