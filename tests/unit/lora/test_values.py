# SPDX-License-Identifier: Apache-2.0
"""Refuse values of an adapter's config that PEFT accepts unchecked, by name."""

import pytest
from peft import LoraConfig

from megarl.errors import AdapterError
from megarl.lora.targets.resolve import resolve_targets
from megarl.model.weights.full_config import names_of
from megarl.peft.rules import check_supported
from megarl.peft.values import check_patterns

LLAMA = names_of({"model_type": "llama", "num_hidden_layers": 2})


def config(**values: object) -> LoraConfig:
    """Return PEFT's config with values set afterwards, as PEFT reads its files unchecked."""
    made = LoraConfig(target_modules=["q_proj", "v_proj"])
    for field, value in values.items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lora_alpha", 0, "'lora_alpha' is 0: input should be greater than 0"),
        ("lora_alpha", -16, "'lora_alpha' is -16"),
        ("lora_alpha", float("nan"), "'lora_alpha' is nan: input should be a finite number"),
        ("lora_alpha", "16", "'lora_alpha' is '16': input should be a valid number"),
        ("lora_alpha", True, "'lora_alpha' is True"),
        ("r", 0, "'r' is 0: input should be greater than or equal to 1"),
        ("r", 8.0, "'r' is 8.0: input should be a valid integer"),
        ("r", True, "'r' is True"),
        ("use_rslora", "yes", "'use_rslora' is 'yes': input should be a valid boolean"),
        ("use_rslora", "no", "'use_rslora' is 'no'"),
        ("lora_bias", "no", "'lora_bias' is 'no'"),
        ("lora_dropout", 1.0, "'lora_dropout' is 1.0: input should be less than 1"),
        ("lora_dropout", None, "'lora_dropout' is None"),
        ("target_modules", [1], "'target_modules.0' is 1: input should be a valid string"),
        ("layers_to_transform", "x", "'layers_to_transform' is 'x'"),
        ("bias", None, "'bias' is None: input should be 'none'"),
        ("trainable_token_indices", 0.0, "'trainable_token_indices' is 0.0: input should be a valid list"),
        ("rank_pattern", {"q_proj": 0}, "'rank_pattern.q_proj' is 0"),
        ("alpha_pattern", {"q_proj": -1}, "'alpha_pattern.q_proj' is -1"),
        ("alpha_pattern", ["q_proj"], r"'alpha_pattern' is \['q_proj'\]"),
        ("rank_pattern", {"(": 4}, r"'\(' is not a regular expression"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(field, value, message):
    with pytest.raises(AdapterError, match=message):
        check_supported(config(**{field: value}))


def test_values_that_mean_something_pass():
    check_supported(config(lora_alpha=0.5, lora_dropout=0, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 1.5}))


def adapt(**values: object) -> None:
    made = config(**values)
    check_patterns(made, set(resolve_targets(made, LLAMA).values()))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_adapted_is_refused(field):
    with pytest.raises(AdapterError, match=f"{field} has 'q_porj', which matches nothing .* did you mean 'q_proj'"):
        adapt(**{field: {"q_porj": 4}})
    with pytest.raises(AdapterError, match="'up_proj', which matches nothing that is adapted"):
        adapt(**{field: {"up_proj": 4}})
    adapt(**{field: {r"layers\.1\.self_attn\.v_proj": 4}})
