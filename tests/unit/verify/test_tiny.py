# SPDX-License-Identifier: Apache-2.0
"""Check that a shrunk config keeps what layouts get wrong, and makes a model that transformers and megarl load."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import WeightFolder, read_config
from megarl.verify.inputs.tiny_model import shrink, write_tiny
from tests.gpu.models import FAMILIES

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
REAL = {
    "llama3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rope_parameters=LLAMA3, bos_token_id=128000,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, eos_token_id=151645,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        mlp_only_layers=[5], norm_topk_prob=True,
    ),
    "mixtral-8x7b": MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    ),
    "llama-mha": LlamaConfig(num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=32),
    "mqa": LlamaConfig(num_attention_heads=32, num_key_value_heads=1, num_hidden_layers=32),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_features_survive_and_the_model_loads(tmp_path, name):
    real = REAL[name].to_dict()
    small = read_config(write_tiny(real, tmp_path / "model"))
    assert small["model_type"] == real["model_type"]
    assert bool(small.get("tie_word_embeddings")) == bool(real.get("tie_word_embeddings"))
    queries = real["num_attention_heads"] // real["num_key_value_heads"]
    assert small["num_attention_heads"] // small["num_key_value_heads"] == min(queries, 4)
    own_head_size = real.get("head_dim") and real["head_dim"] * real["num_attention_heads"] != real["hidden_size"]
    derived = small["hidden_size"] // small["num_attention_heads"]
    assert ((small.get("head_dim") or derived) != derived) == bool(own_head_size)
    assert bool(names_of(small).num_experts) == bool(names_of(real).num_experts)
    assert [names_of(small).sparse(layer) for layer in range(4)] == ([False] + [True] * 3 if "30b" in name else
        [bool(names_of(real).num_experts)] * 4)  # fmt: skip
    files = WeightFolder(tmp_path / "model").file_of
    assert {f"{linear}.weight" for linear in names_of(small).linear_names()} <= files.keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() < 300_000


def test_rope_scaling_is_kept_and_made_to_show_in_short_sequences():
    small = shrink(REAL["llama3-8b"].to_dict())
    assert small["rope_parameters"] == LLAMA3 | {"original_max_position_embeddings": 8}


def test_lists_by_layer_are_cut():
    small = shrink(REAL["qwen3-0.6b"].to_dict())
    assert len(small["layer_types"]) == small["num_hidden_layers"] == 4
    assert AutoConfig.for_model(**small).eos_token_id is None


@pytest.mark.parametrize("name", FAMILIES)
def test_the_models_that_are_verified_on_gpus_shrink_to_ones_that_run(name):
    small = shrink(FAMILIES[name].to_dict())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    assert model(torch.arange(20)[None]).logits.isfinite().all()
    names_of(small)
