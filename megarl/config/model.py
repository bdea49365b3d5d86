# SPDX-License-Identifier: Apache-2.0
"""Which model, in which dtype, by which kernels."""

from typing import Literal

from megarl.config.base import Section


class ModelConfig(Section):
    path: str
    """A Hugging Face folder: ``config.json``, safetensors, tokenizer. Trainer and sampler both start from it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations, on both sides. Adapter weights have an fp32 main copy in the optimizer."""
    backend: Literal["local", "te"] = "local"
    """Layers: ``local`` is mcore's own linears with megarl's packed attention; ``te`` is Transformer Engine's (GPU)."""
