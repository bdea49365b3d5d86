# SPDX-License-Identifier: Apache-2.0
"""Identify a checkpoint's base model by values, however the folder is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.model.checkpoint.identity import difference, identify
from tests.helpers.models import make_model, rope


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("identity") / "model", "llama", tied=False, rope_parameters=rope("llama3")
    )


def copy_of(model, folder, change=lambda weights: weights, **config):
    """Copy the folder with other weights or config fields."""
    folder.mkdir()
    save_file(change(load_file(model / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))
    return folder


def test_what_is_kept_survives_json_and_names_the_model(model):
    kept = json.loads(json.dumps(identify(model)))
    assert difference(kept, model) is None
    assert len(kept["weights"]) > 20


def test_the_same_values_in_more_files_another_dtype_or_an_older_config_are_the_same_model(model, tmp_path):
    narrow = copy_of(model, tmp_path / "narrow", lambda weights: {n: t.bfloat16() for n, t in weights.items()})
    kept = identify(narrow)
    loaded = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "wide", max_shard_size="50KB")
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert difference(kept, tmp_path / "wide") is None
    tree = json.loads((narrow / "config.json").read_text())
    scaling = tree.pop("rope_parameters")
    tree |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (narrow / "config.json").write_text(json.dumps(tree))
    assert difference(kept, narrow) is None


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (None, {"rms_norm_eps": 1e-3}, "rms_norm_eps in its config.json was 1e-05, and is 0.001"),
        (None, {"rope_parameters": rope("linear")}, "rope_parameters in its config.json was "),
        (lambda w: {n: t * 1.001 for n, t in w.items()}, {}, "' had other values"),
        (lambda w: {n: t for n, t in w.items() if "layers.2." not in n}, {}, "it had a tensor 'model.layers.2."),
    ],
    ids=["field", "rope", "weights", "missing"],
)
def test_another_model_of_the_same_shape_is_told_by_what_differs(model, tmp_path, change, config, message):
    other = copy_of(model, tmp_path / "other", *([change] if change else []), **config)
    assert message in difference(identify(model), other)
