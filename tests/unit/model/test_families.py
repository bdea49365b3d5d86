"""What a family does not support is refused by name, before anything is built."""

import pytest

from megarl.errors import UnsupportedError
from megarl.model.families import check_length, family_of, full_config


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mixtral", "sliding_window": 16}, 16),
        ({"model_type": "mixtral"}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_a_sequence_longer_than_the_sliding_window_is_refused(config, longest):
    check_length(config, longest or 10**6, "a sample's length")
    if longest:
        with pytest.raises(UnsupportedError, match=f"sliding_window is {longest}, but a sample's length is"):
            check_length(config, longest + 1, "a sample's length")


def settings(config):
    return family_of(config).settings(full_config(config))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_biases_are_refused(family):
    with pytest.raises(UnsupportedError, match="attention_bias"):
        settings({"model_type": family, "attention_bias": True})
    settings({"model_type": family, "attention_bias": False})
