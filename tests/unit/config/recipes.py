# SPDX-License-Identifier: Apache-2.0
"""A model's shape for recipes, and the error of a wrong one."""

import pytest

from megarl.config import check_run, load_config
from megarl.errors import ConfigError

# Shape of SmolLM2-135M: 9 heads allow TP 1, 3 and 9.
SHAPE = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
}


def message_of(recipe, *overrides, error=ConfigError):
    with pytest.raises(error) as caught:
        check_run(load_config(recipe, overrides))
    assert type(caught.value) is error
    return str(caught.value)
