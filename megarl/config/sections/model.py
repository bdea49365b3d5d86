# SPDX-License-Identifier: Apache-2.0
"""Config section ``model``: the model, its dtype, its layers."""

from typing import Literal

from megarl.config.base import Section


class ModelConfig(Section):
    path: str
    """A Hugging Face folder with ``config.json``, safetensors and tokenizer, or the id of such a model on the Hugging
    Face hub (``Qwen/Qwen3-0.6B``). A model of the hub is downloaded once, before anything starts, into the hub's cache
    (``HF_HOME``); with ``HF_HUB_OFFLINE=1`` it must be there. The run's config names the snapshot's folder. Trainer and
    sampler both load it."""
    family: str | None = None
    """For a ``model_type`` that megarl does not know: ``file.py:Name`` or ``package.module:Name`` of a
    ``megarl.families.base.Family``. The path is relative to the recipe. The file is imported in every process that
    reads the model, so it can also register the type with transformers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations in trainer and sampler. The optimizer has fp32 copies of adapter weights."""
    backend: Literal["local", "te", "transformers"] = "local"
    """``local``: mcore's own linears with megarl's packed attention; ``te``: with Transformer Engine's attention (GPU);
    ``transformers``: Hugging Face transformers with PEFT, for every causal language model, data parallel only."""
    numerics: Literal["fast", "bitwise"] = "fast"
    """``bitwise``: trainer and sampler compute with the same kernels, in one order for every batch, so that the
    trainer's logprob of each drawn token equals the sampler's bit for bit. Dense Qwen3, Qwen2 and Llama models in
    bfloat16 on CUDA with ``backend: local``, without tensor, pipeline or context parallelism. Costs time (see
    ``docs/bitwise.md``). ``fast``: each uses its own fastest kernels, and the two differ by bfloat16's rounding."""
