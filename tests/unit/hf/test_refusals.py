# SPDX-License-Identifier: Apache-2.0
"""Refuse models that transformers would train wrongly or not at all, by name and before anything is trained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
)

from megarl.build import build_model
from megarl.config import ModelConfig, TrainConfig, TrainerConfig, parse_config
from megarl.config.sections.lora import LoraConfig
from megarl.errors import AdapterError, ConfigError, MegarlError, ModelError, UnsupportedError
from megarl.hf import attention
from megarl.hf.inspection import inspect_model
from megarl.hf.lengths import check_length
from megarl.hf.load import load_config
from megarl.launch.names import check_model
from megarl.verify.inputs.samples import make_samples
from tests.helpers.architectures import ARCHITECTURES, SIZES, write_model


def build(folder: Path, **lora: Any) -> Any:
    return build_model(
        {"path": str(folder), "dtype": "float32", "backend": "transformers"},
        lora={"r": 4} | lora,
        train={"device": "cpu", "micro_batch_tokens": 256},
    )


def test_state_spaces_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="model_type 'mamba': layer_types has 'linear_attention'"):
        build(tmp_path)


def test_attention_that_ignores_the_bounds_of_sequences_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "olmo2")
    whole = attention.PackedSequences.from_lengths((19,), torch.device("cpu"))
    original = attention.attend_runs
    monkeypatch.setattr(attention, "attend_runs", lambda q, k, v, packed, *rest: original(q, k, v, whole, *rest))
    with pytest.raises(UnsupportedError, match=r"'olmo2': .* computes a sequence in a pack differently"):
        build(tmp_path)


def test_a_window_that_does_not_reach_the_attention_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The window is longer than the probe's sequences, so that only what the layers ask for shows it.
    write_model(tmp_path, "starcoder2", sliding_window=64)
    build(tmp_path)
    from transformers.models.starcoder2 import modeling_starcoder2

    original = modeling_starcoder2.Starcoder2Attention.forward

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, self.config = self.config, type("Config", (), {"_attn_implementation": attention.NAME})()
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = config

    monkeypatch.setattr(modeling_starcoder2.Starcoder2Attention, "forward", without)
    with pytest.raises(UnsupportedError, match="3 layers have a sliding window of 64 tokens, but only 0 hand it"):
        build(tmp_path)


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "gemma2")
    plain = json.loads((tmp_path / "config.json").read_text())
    assert Gemma2Config(**plain).layer_types
    plain["layer_types"] = ["chunked_attention"] * 3
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(MegarlError, match="chunked_attention"):
        build(tmp_path)


@pytest.mark.parametrize("damage", ["lost", "extra", "shape", "nan"])
def test_a_damaged_folder_is_named_instead_of_trained(tmp_path: Path, damage: str) -> None:
    write_model(tmp_path, "olmo2")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    tensor = tensors.pop(name)
    changed = {
        "lost": {},
        "extra": {name: tensor, "model.layers.1.mlp.more": tensor.clone()},
        "shape": {name: tensor[:, :5].contiguous()},
        "nan": {name: tensor * float("nan")},
    }[damage]
    save_file(tensors | changed, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp"):
        build(tmp_path)


def test_quantised_weights_and_unknown_models_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "olmo2")
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(plain | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match="has a quantization_config"):
        build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain | {"model_type": "another"}))
    with pytest.raises(ModelError, match="transformers rejects it"):
        build(tmp_path)


def test_a_sample_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    model = build(write_model(tmp_path, "olmo2"))
    with pytest.raises(ConfigError, match=r"a sample's length \(\d+\) exceeds .* max_position_embeddings \(128"):
        model.pack(make_samples(40, SIZES["vocab_size"], longest=200))


def test_a_sample_beyond_longropes_original_length_is_refused(tmp_path: Path) -> None:
    """transformers would compute its shorter neighbours in a pack with the long factors too."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    folder = write_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    model = build(folder)
    samples = make_samples(40, SIZES["vocab_size"], longest=48)
    short = [sample for sample in samples if len(sample.tokens) <= 32]
    assert 10 < len(short) < 40
    model.pack(short)
    message = r"longrope RoPE changes beyond 32 tokens \(original_max_position_embeddings\), but "
    with pytest.raises(UnsupportedError, match=message + r"a sample's length is \d+; supported are sequences up to"):
        model.pack(samples)
    section = ModelConfig(path=str(folder), backend="transformers", dtype="float32")
    inspect_model(TrainerConfig(section, train=TrainConfig(device="cpu"), longest=32))
    with pytest.raises(UnsupportedError, match=message + "sampler.max_prompt_tokens"):
        inspect_model(TrainerConfig(section, train=TrainConfig(device="cpu"), longest=33))


def test_longrope_by_kind_of_layer_is_found() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    kinds = {"full_attention": longrope, "sliding_attention": {"rope_type": "default"}}
    config = type("Config", (), {"rope_parameters": kinds})()
    check_length(config, 32, "a length")
    with pytest.raises(UnsupportedError, match="changes beyond 32 tokens"):
        check_length(config, 33, "a length")
    check_length(type("Config", (), {})(), 10**9, "a length")


@pytest.mark.parametrize(
    ("lora", "error", "match"),
    [
        ({"target_modules": ["q_prj"]}, AdapterError, "q_prj"),
        ({"rank_pattern": {"k_prj": 3}}, AdapterError, "rank_pattern has 'k_prj'"),
        ({"target_parameters": ["nothing"], "target_modules": ["q_proj"]}, AdapterError, "nothing"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_any_rank_starts(
    tmp_path: Path, lora: dict[str, Any], error: type[Exception], match: str
) -> None:
    section = ModelConfig(path=str(write_model(tmp_path, "olmo2")), backend="transformers", dtype="float32")
    inspect_model(TrainerConfig(section, train=TrainConfig(device="cpu")))
    with pytest.raises(error, match=match):
        inspect_model(TrainerConfig(section, lora=LoraConfig(**lora), train=TrainConfig(device="cpu")))


def test_the_text_model_of_a_model_with_images_is_taken_only_when_written_out(tmp_path: Path) -> None:
    """The way that the document shows."""
    text = SIZES | ARCHITECTURES["gemma3_text"]
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(UnsupportedError, match="'gemma3' has other parts than its text model; write the text model"):
        load_config(tmp_path / "whole")
    document = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    exec(code.replace("/path/to/gemma-3-4b-it", f"{tmp_path}/whole").replace("/path/to/text", f"{tmp_path}/text"), {})
    load_config(tmp_path / "text")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole").eval()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    tokens = torch.arange(3, 40)[None]
    assert torch.equal(written(tokens).logits, whole(input_ids=tokens).logits)


def test_a_base_that_could_not_be_sent_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    """transformers stacks experts that the files hold one by one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for model_type, settings in (("qwen3_moe", experts), ("qwen3", {})):
        model = write_model(tmp_path / model_type, model_type, hidden_size=128, head_dim=32, **settings)
        sections = {
            "model": {"path": str(model), "backend": "transformers"},
            "task": {"name": "arithmetic"},
            "sampler": {"max_prompt_tokens": 64, "max_response_tokens": 16},
            "train": {"device": "cpu", "micro_batch_tokens": 256},
        }
        check_model(parse_config(sections | {"checkpoint_engine": {"base_weights": "disk"}}))
        if not settings:
            check_model(parse_config(sections))
            continue
        with pytest.raises(
            UnsupportedError, match=r"experts\S+ is not a tensor .* checkpoint_engine.base_weights=disk"
        ):
            check_model(parse_config(sections))
