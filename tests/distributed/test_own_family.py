# SPDX-License-Identifier: Apache-2.0
"""Build a model whose ``model_type`` only the user's own family knows, and compare it with Hugging Face's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from megarl.config import check_run, parse_config
from megarl.errors import ConfigError
from megarl.families import FAMILIES, add_family
from megarl.launch.names import with_absolute_paths
from megarl.verify.inputs.samples import make_samples
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

OWN = """
from transformers import AutoConfig, LlamaConfig

from megarl.families import llama
from dataclasses import replace


class HomemadeConfig(LlamaConfig):
    model_type = "homemade"


AutoConfig.register("homemade", HomemadeConfig)
FAMILY = replace(llama.FAMILY, model_types=("homemade",))
KNOWN = llama.FAMILY
NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "homemade"}))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def logprobs(folder: str) -> list[np.ndarray]:
    from megarl import build_model

    model = build_model({"path": f"{folder}/model", "family": f"{folder}/own.py:FAMILY", "dtype": "float32"})
    add_family(f"{folder}/own.py:FAMILY")  # does nothing; importing the file again would raise
    return model.forward(model.pack(make_samples(4, SHAPE["vocab_size"])))


def test_a_model_of_an_own_family_equals_hugging_faces(folder):
    (actual,) = run_ranks(logprobs, 1, str(folder))
    file = folder / "model" / "config.json"
    file.write_text(file.read_text().replace("homemade", "llama"))
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


def test_a_run_finds_the_family_beside_the_recipe(folder):
    config = with_absolute_paths(run_config(folder, "own.py:FAMILY"), folder)
    assert config.model.family == f"{folder}/own.py:FAMILY"
    try:
        check_run(config)
        assert FAMILIES["homemade"].sampler
    finally:
        FAMILIES.pop("homemade", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [("KNOWN", "for model_type 'llama', which megarl knows"), ("NUMBER", "which is int; it must be"), ("F", "no 'F'")],
)
def test_what_is_no_family_of_the_model_is_refused(folder, name, message):
    (folder / "own.py").write_text(OWN.replace("AutoConfig.register", "# "))
    with pytest.raises(ConfigError, match=message):
        add_family(f"{folder}/own.py:{name}")
