"""Which modules a PEFT config adapts: as PEFT decides; by name where PEFT or a saved file would decide otherwise."""

import pytest
from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.targets import check_supported, rank_and_scaling, resolve_targets
from megarl.model.families import names_of

LLAMA = names_of({"model_type": "llama", "num_hidden_layers": 2})


def resolve(**settings: object) -> set[str]:
    return resolve_targets(LoraConfig(**settings), LLAMA)


@pytest.mark.parametrize("expression", [r"model\.layers\.0.*", ".*", r".*(up_proj|norm)"])
def test_an_expression_that_matches_more_than_linear_layers_is_refused_as_in_peft(expression):
    with pytest.raises(AdapterError, match="which is no linear layer"):
        resolve(target_modules=expression, exclude_modules=["lm_head", "embed_tokens"])


def test_patterns_whose_order_decides_are_refused_unless_they_are_sorted():
    patterns = {"v_proj": 4, r"layers\.0\.self_attn\.v_proj": 2}
    for field in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(UnsupportedError, match=f"{field} has 'v_proj' and .* PEFT sorts them"):
            resolve(target_modules=["v_proj"], **{field: patterns})
        in_order = {key: patterns[key] for key in sorted(patterns)}
        assert len(resolve(target_modules=["v_proj"], **{field: in_order})) == 2
    config = LoraConfig(r=8, target_modules=["v_proj"], rank_pattern=in_order)
    assert rank_and_scaling(config, "model.layers.0.self_attn.v_proj")[0] == 2
    assert rank_and_scaling(config, "model.layers.1.self_attn.v_proj")[0] == 4


def test_dora_and_other_methods_are_refused_by_name():
    for field, value in (("use_dora", True), ("lora_bias", True), ("modules_to_save", ["lm_head"]), ("bias", "all")):
        with pytest.raises(UnsupportedError, match=f"adapter config: {field} is"):
            check_supported(LoraConfig(target_modules=["q_proj"], **{field: value}))
