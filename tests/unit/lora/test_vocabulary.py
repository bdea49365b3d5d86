# SPDX-License-Identifier: Apache-2.0
"""Test adapters of the embedding and of lm_head: PEFT's files, and merges that untie."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from megarl.config import ParallelConfig
from megarl.lora.merge import merge_folder
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

TARGETS = ["embed_tokens", "lm_head", "q_proj"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head", "q_proj"], TARGETS], ids="-".join)
def test_merged_folder_gives_pefts_logprobs_and_tied_weights_part(tmp_path, tied, targets):
    model = make_model(tmp_path / "model", "llama", tied=tied)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets)
    merge_folder(model, adapter, tmp_path / "merged")
    merged, peft = load_reference(tmp_path / "merged", None), load_reference(model, adapter)
    for sample in make_samples(3, 131):
        with torch.no_grad():
            assert relative_error(logprobs_of(merged, sample), logprobs_of(peft, sample)) < 1e-5
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")


def on_one_rank(folder: str, model: str) -> dict:
    """Start an adapter of one seed, then load PEFT's file, with base weights and with other base weights."""
    from pathlib import Path

    from megarl.errors import AdapterError
    from megarl.lora import attach, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups
    from tests.helpers.cases import make_config

    root = Path(folder)
    groups = init_groups(ParallelConfig(), pick_device("auto"))
    config = load_peft_config(root / "adapter")
    model = MegatronModel(make_config(Path(model), {}).trainer, groups, attach(config, seed=3))
    results = {"start": {name: tensor.clone() for name, tensor in model.adapter.export()}}
    model.load_adapter(root / "adapter")
    results["loaded"] = {name: tensor.clone() for name, tensor in model.adapter.export()}
    try:
        model.load_adapter(root / "foreign")
    except AdapterError as error:
        results["refused"] = str(error)
    return results


@pytest.mark.parametrize("tied", [False, True])
def test_pefts_file_with_base_weights_loads_and_another_models_is_refused(tmp_path, tied):
    model = make_model(tmp_path / "model", "qwen3", tied=tied)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=TARGETS)
    tensors = load_file(adapter / "adapter_model.safetensors")
    stored = [name for name in tensors if name.endswith(".base_layer.weight")]
    assert len(stored) == 2  # PEFT writes them
    shutil.copytree(adapter, tmp_path / "foreign")
    tensors["base_model.model.lm_head.base_layer.weight"][100, 3] += 1
    save_file(tensors, tmp_path / "foreign/adapter_model.safetensors")
    [results] = run_ranks(on_one_rank, 1, str(tmp_path), str(model))
    assert results["loaded"].keys() == tensors.keys() - set(stored)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in results["loaded"].items())
    assert "'base_model.model.lm_head.base_layer.weight' differs from the model's own weight" in results["refused"]
    check_start(results["start"], load_reference(model, None))


def check_start(start: dict[str, torch.Tensor], base: torch.nn.Module) -> None:
    """Check that the embedding starts as in PEFT: A zero, B standard normal; others as usual."""
    peft = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS))
    for name, tensor in peft.named_parameters():
        if tensor.requires_grad:
            mine = start.pop(name.replace(".default", ""))
            assert mine.shape == tensor.shape
            assert (mine.abs().max() == 0) == (tensor.abs().max() == 0)
            assert abs(float(mine.std() - tensor.std())) < 0.3 * float(tensor.std()) + 1e-9, name
    assert not start
