# SPDX-License-Identifier: Apache-2.0
"""Refuse a folder whose files do not make the model of its config.json, by name; never load it in part."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ParallelConfig
from megarl.errors import MegarlError
from tests.distributed.test_round_trips import exported
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

LAYER = "model.layers.3."
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def no_change(weights):
    return weights


def poisoned(weights, value):
    weights["model.layers.2.mlp.up_proj.weight"][7, 3] = value
    return weights


# name -> (tied, change of config.json, change of the weights, text of the error; None if it loads)
CASES = {
    "fewer-layers": (False, {"num_hidden_layers": 3}, no_change, f"holds '{LAYER}input_layernorm.weight', which the"),
    "more-layers": (False, {"num_hidden_layers": 5}, no_change, "lacks the tensor 'model.layers.4.input_layernorm"),
    "biases": (
        False,
        {},
        lambda w: w | {f"{LAYER}self_attn.q_proj.bias": torch.ones(64)},
        f"holds '{LAYER}self_attn.q_proj.bias', which the model",
    ),
    "another-tensor": (False, {}, lambda w: w | {"model.extra.weight": torch.ones(3)}, "holds 'model.extra.weight'"),
    "frequencies": (False, {}, lambda w: w | {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8)}, None),
    "tied-with-a-copy": (True, {}, lambda w: w | {OUTPUT: w[EMBEDDING].clone()}, None),
    "tied-with-another": (
        True,
        {},
        lambda w: w | {OUTPUT: w[EMBEDDING] + 1},
        "tie_word_embeddings true, but 'lm_head.weight' differs from 'model.embed_tokens.weight'",
    ),
    "untied-without-output": (True, {"tie_word_embeddings": False}, no_change, "lacks the tensor 'lm_head.weight'"),
    "nan": (False, {}, lambda w: poisoned(w, torch.nan), "'model.layers.2.mlp.up_proj.weight' in .* not finite"),
    "infinity": (False, {}, lambda w: poisoned(w, -torch.inf), "'model.layers.2.mlp.up_proj.weight' in .* not finite"),
    "integers": (
        False,
        {},
        lambda w: w | {"model.norm.weight": torch.ones(48, dtype=torch.int8)},
        "'model.norm.weight' in .* is of dtype I8",
    ),
    "float8": (
        False,
        {},
        lambda w: w | {"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)},
        "'model.norm.weight' in .* is of dtype F8_E4M3",
    ),
    "another-shape": (False, {"vocab_size": 132}, no_change, "has shape"),
}


def write_case(folder: Path, name: str) -> Path:
    tied, config, change, _ = CASES[name]
    path = make_model(folder / name, "llama", tied=tied)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path


def load_each(folders: list[str]) -> list[str | None]:
    """Return what loading each folder raises."""
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    groups = init_groups(ParallelConfig(), pick_device("auto"))
    said: list[str | None] = []
    for folder in folders:
        try:
            exported(Path(folder), ParallelConfig(), groups)
            said.append(None)
        except MegarlError as error:
            said.append(str(error))
    return said


def test_only_whole_models_load(tmp_path):
    folders = [write_case(tmp_path, name) for name in CASES]
    (said,) = run_ranks(load_each, 1, [str(folder) for folder in folders])
    for (name, (*_, expected)), message in zip(CASES.items(), said, strict=True):
        if expected is None:
            assert message is None, name
        else:
            with pytest.raises(MegarlError, match=expected):
                raise MegarlError(message)
