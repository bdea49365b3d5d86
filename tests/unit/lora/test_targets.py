# SPDX-License-Identifier: Apache-2.0
"""Resolve the modules that a PEFT config adapts, as PEFT does; refuse where PEFT or a saved file would differ."""

import dataclasses

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.targets.resolve import order_independent, resolve_targets
from megarl.model.weights.full_config import names_of
from megarl.peft.rules import check_supported, rank_and_scaling
from tests.helpers.models import SHAPE

LLAMA = names_of({"model_type": "llama", "num_hidden_layers": 2})


def resolve(**settings: object) -> dict[str, str]:
    return resolve_targets(LoraConfig(**settings), LLAMA)


@pytest.mark.parametrize("expression", [r"model\.layers\.0.*", ".*", r".*(up_proj|norm)"])
def test_an_expression_that_matches_more_than_linear_layers_is_refused_as_in_peft(expression):
    with pytest.raises(AdapterError, match="which is no linear layer"):
        resolve(target_modules=expression, exclude_modules=["lm_head", "embed_tokens"])


OVERLAPS = [
    {"v_proj": 4, r"layers\.0\.self_attn\.v_proj": 2},
    {r"layers\.0\.self_attn\.v_proj": 2, "v_proj": 4},
    {"self_attn.q_proj": 2, ".*_proj": 3, "q_proj": 5},
    {"q": 5, ".*q_proj": 3, "layers.1.*": 6, "v_proj": 1},
]


@pytest.mark.parametrize("pattern", OVERLAPS, ids=str)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_overlap_mean_what_they_mean_in_peft_also_once_peft_has_sorted_them(field, pattern):
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], field: pattern}
    with torch.device("meta"):
        hf_config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 2})
        model = get_peft_model(transformers.AutoModelForCausalLM.from_config(hf_config), LoraConfig(**settings))
    config = LoraConfig(**settings)
    settled = order_independent(config, LLAMA)
    last = dataclasses.replace(settled, **{field: dict(sorted(getattr(settled, field).items()))})
    for name in resolve(**settings):
        module = model.get_submodule(f"base_model.model.{name}")
        theirs = (module.r["default"], module.scaling["default"])
        assert rank_and_scaling(config, name) == rank_and_scaling(last, name) == theirs


def test_dora_and_other_methods_are_refused_by_name():
    settings = {
        "use_dora": (True, "merge the adapter into the base"),
        "lora_bias": (True, "train with lora_bias=false"),
        "modules_to_save": (["lm_head"], "adapt embed_tokens and lm_head by target_modules"),
        "bias": ("all", "train with bias='none'"),
        "trainable_token_indices": ([1], "adapt embed_tokens by target_modules"),
    }
    for field, (value, way_out) in settings.items():
        with pytest.raises(UnsupportedError, match=f"adapter config: {field} is .*{way_out}"):
            check_supported(LoraConfig(target_modules=["q_proj"], **{field: value}))
