# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random model with the features of a real one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megarl.families import family_of

LAYERS = 4
HEAD_DIM, EXPERTS_PER_TOKEN, MOST_QUERIES_PER_KV = 16, 2, 4


def shrink(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small ``config.json`` that keeps every feature that a layout could get wrong.

    Kept: grouped queries (at most 4 per key), biases, tied embeddings, an explicit head size, latent attention, RoPE's
    scaling, the choice of layers with experts, groups of experts, norms, constants. Dropped: special token ids,
    quantisation.
    """
    sizes = family_of(hf_config).tiny
    small = {key: _small(key, value, sizes) for key, value in hf_config.items()}
    layers = hf_config["num_hidden_layers"]
    small["num_hidden_layers"] = LAYERS
    heads, kv_heads = hf_config["num_attention_heads"], hf_config.get("num_key_value_heads")
    queries = min(heads // (kv_heads or heads), MOST_QUERIES_PER_KV)
    small["num_key_value_heads"] = min(kv_heads or 2, 2) if queries > 1 else 4
    small["num_attention_heads"] = small["num_key_value_heads"] * queries
    small.pop("head_dim", None)
    # With multi-latent attention transformers' class derives head_dim from qk_rope_head_dim.
    latent = bool(hf_config.get("kv_lora_rank"))
    if not latent and hf_config.get("head_dim") and hf_config["head_dim"] * heads != hf_config["hidden_size"]:
        small["head_dim"] = HEAD_DIM
    for key, value in small.items():
        if isinstance(value, list) and len(value) == layers:
            small[key] = value[:LAYERS]
        if isinstance(value, dict):
            small[key] = {k: _small(k, v, sizes) for k, v in value.items()}
    if dense := hf_config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [layer for layer in dense if layer < LAYERS] or [0]
    if hf_config.get("num_experts_per_tok"):
        small["num_experts_per_tok"] = min(hf_config["num_experts_per_tok"], EXPERTS_PER_TOKEN)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype", "dtype"):
        small.pop(key, None)
    return small


def _small(key: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """Return the family's tiny size. Absent sizes and sizes of 1 stay, such as a single group of experts."""
    return sizes[key] if key in sizes and isinstance(value, int) and value > 1 else value


def write_tiny(hf_config: Mapping[str, Any], folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a random model with the shrunk config as a Hugging Face folder."""
    small = shrink(hf_config)
    return write_random(AutoConfig.for_model(**small), folder, dtype=dtype, seed=seed)


def write_random(config: PretrainedConfig, folder: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a random model as a Hugging Face folder, with no weight at a value that would hide an error."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases start at 1 and 0, which would hide a mapping that exchanges them.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.06)
    model.save_pretrained(folder)
    return folder
