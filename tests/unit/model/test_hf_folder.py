# SPDX-License-Identifier: Apache-2.0
"""Follow a folder's index inside the folder only, and check it against the files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ParallelConfig
from megarl.errors import ConfigError, MegarlError, ModelError, UnsupportedError
from megarl.model.inspection import inspect_folder
from megarl.model.weights.hf_folder import INDEX, WeightFolder
from tests.helpers.models import FAMILIES, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("folder") / "model", "llama", tied=False)


def with_index(model, folder, index):
    """Move the model's file to another name, and write an index."""
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    (folder / "part.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    return folder


@pytest.mark.parametrize("file", ["../part.safetensors", "/etc/passwd", "sub/part.safetensors", "..", ".", ""])
def test_an_index_that_leaves_the_folder_is_refused(model, tmp_path, file):
    (tmp_path / "part.safetensors").write_bytes(b"outside")
    folder = with_index(model, tmp_path / "model", {"weight_map": {"model.norm.weight": file}})
    with pytest.raises(ModelError, match="it must name files of its own folder"):
        WeightFolder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[1]", "no JSON object"),
        ("{", "cannot be read as JSON"),
        ({}, "no valid weight_map"),
        ({"weight_map": ["part.safetensors"]}, "no valid weight_map"),
        ({"weight_map": {"a": 1}}, "no valid weight_map"),
        ({"weight_map": {"a": "other.safetensors"}}, "names other.safetensors, which is not in the folder"),
    ],
)
def test_an_index_that_is_none_is_an_error(model, tmp_path, index, message):
    with pytest.raises(ModelError, match=message):
        WeightFolder(with_index(model, tmp_path / "model", index))


def test_an_index_that_names_what_its_file_lacks_is_an_error(model, tmp_path):
    names = dict.fromkeys(load_file(model / "model.safetensors"), "part.safetensors")
    assert len(inspect_folder(with_index(model, tmp_path / "right", {"weight_map": names}), ParallelConfig())) > 20
    file = tmp_path / "right" / "part.safetensors"
    save_file({"model.norm.weight": torch.ones(48)}, file)
    with pytest.raises(ModelError, match="which lacks it"):
        inspect_folder(tmp_path / "right", ParallelConfig())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_transformers_writes_it_passes(tmp_path, family):
    folder = make_model(tmp_path / "model", family, tied=False)
    full = inspect_folder(folder, ParallelConfig())
    assert full["num_hidden_layers"] == 4
    with pytest.raises(ConfigError, match="must divide"):
        inspect_folder(folder, ParallelConfig(tensor=3))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(UnsupportedError, match="is_causal is False"):
        inspect_folder(folder, ParallelConfig())


def test_layers_that_predict_further_tokens_are_dropped_and_others_are_not(tmp_path):
    folder = make_model(tmp_path / "model", "deepseek_v3", tied=False)
    weights = load_file(folder / "model.safetensors")
    further = {name.replace(".3.", ".4."): tensor.clone() for name, tensor in weights.items() if ".layers.3." in name}
    save_file(weights | further, folder / "model.safetensors")
    with pytest.raises(MegarlError, match=r"holds 'model[.]layers[.]4[.]input_layernorm[.]weight', which the model"):
        inspect_folder(folder, ParallelConfig())
    further["model.layers.4.eh_proj.weight"] = torch.ones(48, 96)
    save_file(weights | further, folder / "model.safetensors")
    inspect_folder(folder, ParallelConfig())
