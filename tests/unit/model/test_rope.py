# SPDX-License-Identifier: Apache-2.0
"""Test scaled RoPE: transformers' own frequencies, and refusals by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from megarl.errors import MegarlError, UnsupportedError
from megarl.model.layers.attention.rope import rope_of
from tests.helpers.models import FAMILIES, ROPES, SHAPE, rope

LLAMA = {"model_type": "llama", **SHAPE}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_the_transformers_model(family, kind):
    config_class, extra = FAMILIES[family]
    config = config_class(**{**SHAPE, **extra, "rope_parameters": rope(kind)})
    if family == "mixtral" and kind == "yarn":
        with pytest.raises(UnsupportedError, match="transformers rejects"):  # head_dim is None
            rope_of(config.to_dict())
        return
    reference = AutoModel.from_config(config).rotary_emb
    actual = rope_of(config.to_dict())
    assert torch.equal(actual.frequencies, reference.inv_freq)
    assert actual.attention_factor == reference.attention_scaling
    assert actual.base == 10000.0


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 256), ("longrope", 128)])
def test_sequences_whose_frequencies_transformers_changes_are_refused(kind, longest):
    config = AutoConfig.for_model(**{**LLAMA, "rope_parameters": rope(kind)})
    actual, model = rope_of(config.to_dict()), AutoModel.from_config(config).rotary_emb
    assert actual.longest == longest
    for length, same in ((longest, True), (longest + 1, False)):
        model(torch.zeros(1, length, 48), torch.arange(length)[None])
        assert torch.equal(actual.frequencies, model.inv_freq) == same
        if same:
            assert actual.attention_factor == model.attention_scaling
            actual.check_length(length, "a sample's length")
        else:
            with pytest.raises(UnsupportedError, match=f"beyond {longest} tokens, but a sample's length is {length}"):
                actual.check_length(length, "a sample's length")


def test_config_json_of_older_transformers_means_the_same():
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": 8, **ROPES["llama3"]}
    old = rope_of({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = rope_of({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old.base == new.base == 5e5
    assert torch.equal(old.frequencies, new.frequencies)
    assert "rope_theta" not in scaling  # the parsed config.json is not changed


@pytest.mark.parametrize("family", FAMILIES)
def test_partial_rotation_is_refused_as_no_class_of_transformers_has_it(family):
    """If transformers begins to rotate a part of each head, this fails; then it can be supported."""
    config_class, extra = FAMILIES[family]
    shape = {**SHAPE, **extra, "num_hidden_layers": 1}
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    configs = [
        config_class(**shape, rope_parameters=parameters | more) for more in ({}, {"partial_rotary_factor": 0.5})
    ]
    models = [AutoModel.from_config(config) for config in configs]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        whole, partly = (model(torch.arange(6)[None]).last_hidden_state for model in models)
    assert torch.equal(whole, partly)
    for given in (configs[1].to_dict(), configs[0].to_dict() | {"partial_rotary_factor": 0.5}):
        with pytest.raises(UnsupportedError, match=r"partial_rotary_factor is 0\.5; supported is 1\.0"):
            rope_of(given)


@pytest.mark.parametrize(("family", "theta"), [("llama", 1e4), ("mixtral", 1e6)])
def test_rope_theta_defaults_to_the_familys(family, theta):
    assert rope_of({"model_type": family, **SHAPE}).base == theta
    assert AutoConfig.for_model(family).rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize(
    ("rope_parameters", "part"),
    [
        ({"rope_type": "proportional"}, "rope_type is 'proportional'; supported are default, linear, llama3, yarn"),
        ({"rope_type": None}, "rope_type is None; supported are"),
        ({"rope_type": 0}, "rope_type is 0; supported are"),
        ({"rope_type": ["default"]}, "rope_type is ['default']; supported are"),
        ({"rope_theta": "8"}, "rope_theta is '8'; it must be a number above 1"),
        ({"type": "longrope"}, "transformers rejects it"),
        ({"rope_type": "llama3", "factor": 8.0}, "transformers rejects it"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer (full_attention)"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported is 1.0"),
    ],
)
def test_other_ropes_are_refused_by_name(rope_parameters, part):
    with pytest.raises(MegarlError) as failure:
        rope_of({**LLAMA, "rope_parameters": rope_parameters})
    assert part in str(failure.value)
