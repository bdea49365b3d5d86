# SPDX-License-Identifier: Apache-2.0
"""Write tiny random models of architectures that only ``model.backend: transformers`` trains."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Two layers of each kind of attention would be slower and show no more.
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 6, **WINDOWS}
# model_type -> settings besides ``SIZES``. Each has something that the others have not.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere2": {"logit_scale": 0.25, **WINDOWS},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **GEMMA},
    "gemma3_text": GEMMA,
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "olmo2": {},
    "phi": {},
    "phi3": {"sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": 8},
}


def write_model(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write a random model; weights are large enough for distributions that are far from uniform."""
    config = CONFIG_MAPPING[model_type](**(SIZES | ARCHITECTURES.get(model_type, {}) | settings))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif "sinks" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder
