# SPDX-License-Identifier: Apache-2.0
"""Check that each back end refuses the settings that it does not have."""

import pytest

from megarl.config import load_config
from megarl.errors import UnsupportedError
from tests.unit.config.recipes import message_of


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("parallel.tensor=2", "parallel.tensor = 2"),
        ("parallel.pipeline=2", "parallel.pipeline = 2"),
        ("parallel.context=2", "parallel.context = 2"),
        ("train.recompute=selective", "train.recompute = 'selective'"),
        ("train.cuda_graphs=true", "train.cuda_graphs = True"),
        ("train.compile=true", "train.compile = True"),
        ("train.distributed_optimizer=true", "train.distributed_optimizer = True"),
        ("lora.save_experts=stacked", "lora.save_experts = 'stacked'"),
    ],
)
def test_transformers_refuses_what_only_megatron_has(recipe, override, named):
    assert load_config(recipe, ["model.backend=transformers", "parallel.data=2", "train.shard_base=true"])
    refused = message_of(recipe, "model.backend=transformers", override, error=UnsupportedError)
    assert f"model.backend is 'transformers' with {named}; supported are parallel.data" in refused


@pytest.mark.parametrize("backend", ["local", "te"])
def test_what_megatron_has_can_be_compiled(recipe, backend):
    everything = ["parallel.pipeline=2", "train.recompute=full", "lora.lora_dropout=0.1"]
    assert load_config(recipe, ["train.compile=true", f"model.backend={backend}", *everything]).train.compile


def test_a_base_is_sharded_by_transformers_only(recipe):
    assert "train.shard_base is true with model.backend 'local'" in message_of(recipe, "train.shard_base=true")
