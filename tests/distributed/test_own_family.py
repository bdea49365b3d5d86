# SPDX-License-Identifier: Apache-2.0
"""Build a model whose ``model_type`` only the user's own family knows, and compare it with Hugging Face's."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from megarl.config import check_run, parse_config
from megarl.errors import ConfigError, ModelError, UnsupportedError
from megarl.families import FAMILIES, add_family, llama
from megarl.launch.names import with_absolute_paths
from megarl.model.weights.full_config import complete, names_of
from megarl.model.weights.hf_folder import read_config
from megarl.verify.inputs.samples import make_samples
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

OWN = """
from dataclasses import replace

from transformers import AutoConfig, LlamaConfig

from megarl.families import llama


class RenamedConfig(LlamaConfig):
    model_type = "renamed"


AutoConfig.register("renamed", RenamedConfig)  # raises the second time
FAMILY = replace(llama.FAMILY, model_types=("renamed",))
KNOWN = llama.FAMILY
NUMBER = 3
"""


def rename(folder: Path, model_type: str) -> None:
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    rename(tmp_path, "renamed")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def logprobs(folder: str) -> list[np.ndarray]:
    from megarl import build_model

    model = build_model({"path": f"{folder}/model", "family": f"{folder}/own.py:FAMILY", "dtype": "float32"})
    add_family(f"{folder}/own.py:FAMILY")  # does nothing; importing the file again would raise
    return model.forward(model.pack(make_samples(4, SHAPE["vocab_size"])))


def test_a_model_of_an_own_family_equals_hugging_faces(folder):
    (actual,) = run_ranks(logprobs, 1, str(folder))
    rename(folder, "llama")
    truth = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for sample, row in zip(make_samples(4, SHAPE["vocab_size"]), actual, strict=True):
        tokens = torch.from_numpy(sample.tokens)
        with torch.no_grad():
            logits = truth(tokens[None]).logits[0].log_softmax(-1)
        expected = logits[:-1].gather(1, tokens[1:, None])[:, 0].numpy()[sample.response_mask[1:]]
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)


def run_config(folder: Path, name: str | None):
    model = {"path": str(folder / "model"), "family": name}
    sampler = {"max_prompt_tokens": 24, "max_response_tokens": 24}
    return parse_config({"model": model, "task": {"name": "arithmetic"}, "sampler": sampler})


def test_a_run_finds_the_family_beside_the_recipe_and_refuses_another_models(folder):
    config = run_config(folder, "own.py:FAMILY")
    try:
        check_run(config, folder)
        resolved = with_absolute_paths(config, folder)
        assert resolved.model.family == f"{folder}/own.py:FAMILY"
        check_run(resolved)
        assert names_of(read_config(folder / "model")).num_layers == SHAPE["num_hidden_layers"]
        rename(folder, "llama")
        with pytest.raises(ConfigError, match="for model_type 'renamed', but the model's config"):
            check_run(resolved)
    finally:
        FAMILIES.pop("renamed", None)


def test_without_the_family_the_model_is_refused(folder):
    with pytest.raises(UnsupportedError, match=r"model_type in config\.json 'renamed'"):
        read_config(folder / "model")


def test_a_type_that_transformers_does_not_know_is_an_error_that_says_what_to_do():
    unknown = replace(llama.FAMILY, model_types=("nowhere",))
    with pytest.raises(ModelError, match=r"no config class for model_type 'nowhere'; call Auto"):
        complete({"model_type": "nowhere"}, unknown)


@pytest.mark.parametrize(
    ("name", "message"),
    [("KNOWN", "for model_type 'llama', which megarl knows"), ("NUMBER", "which is int; it must be"), ("F", "no 'F'")],
)
def test_what_is_no_family_of_the_model_is_refused(folder, name, message):
    (folder / "own.py").write_text(OWN.replace("AutoConfig.register", "# "))
    with pytest.raises(ConfigError, match=message):
        add_family(f"{folder}/own.py:{name}")
