# SPDX-License-Identifier: Apache-2.0
"""Tell mixtures of experts from other models, in families that are listed or not."""

import json

import pytest

from megarl.verify.inputs.model_facts import has_experts
from tests.helpers.models import SHAPE


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {}, False),
        ("qwen3_moe", {"num_experts": 4}, True),
        ("mixtral", {"num_local_experts": 4}, True),
        ("olmo2", {}, False),
        ("olmoe", {"num_experts": 4}, True),
        ("gpt_oss", {"num_local_experts": 4}, True),
        ("ernie4_5_moe", {"moe_num_experts": 4}, True),
        ("dbrx", {"ffn_config": {"moe_num_experts": 4}}, True),
    ],
)
def test_experts_are_found_by_the_key_of_any_family(tmp_path, model_type, settings, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SHAPE, **settings}))
    assert has_experts(tmp_path) is expected
