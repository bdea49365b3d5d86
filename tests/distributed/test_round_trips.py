# SPDX-License-Identifier: Apache-2.0
"""Property tests: random models and random PEFT adapters pass through megarl unchanged."""

import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megarl.config import ModelConfig, ParallelConfig, TrainConfig
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

# Examples are derived from the test's source, so that a failure repeats; they run inside a rank's process.
QUICK: dict = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@st.composite
def shapes(draw, ranks: int = 1) -> dict:
    """Draw arguments of ``make_model``: shapes that ``ranks`` tensor-parallel ranks can share."""
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]))
    kv_heads = ranks * draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 8))
    shape = {
        "family": family,
        "tied": draw(st.booleans()),
        "vocab_size": draw(st.integers(3, 200)),
        "hidden_size": heads * head_dim if family == "qwen2" else heads * draw(st.integers(1, 12)) * 2,
        "intermediate_size": ranks * draw(st.integers(2, 30)),
        "num_hidden_layers": ranks * draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    if family != "qwen2":
        shape["head_dim"] = head_dim
    if family == "qwen3_moe":
        layers = st.sets(st.integers(0, shape["num_hidden_layers"] - 1))
        shape |= {"moe_intermediate_size": ranks * draw(st.integers(2, 9)), "mlp_only_layers": sorted(draw(layers))}
    return shape


def exported(path: Path, parallel: ParallelConfig, groups) -> dict[str, torch.Tensor]:
    """Load a folder into mcore's model and export it."""
    from megarl.model.layers.build import build_chunks
    from megarl.model.weights.base_tensors import base_tensors, load_base
    from megarl.model.weights.full_config import names_of
    from megarl.model.weights.hf_folder import read_config
    from megarl.model.weights.streaming import stream_full

    hf = read_config(path)
    config = ModelConfig(path=str(path), dtype=str(hf["dtype"]))
    chunks = build_chunks(hf, config, parallel, groups, TrainConfig())
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.fill_(float("nan"))
    load_base(chunks, path, hf, groups)
    tensors = [tensor for chunk in chunks for tensor in base_tensors(chunk, names_of(hf), groups)]
    return {name: tensor.clone() for name, tensor in stream_full(tensors, groups)}


def check_same(path: Path, actual: dict[str, torch.Tensor]) -> None:
    original = load_file(path / "model.safetensors")
    assert actual.keys() == original.keys()
    for name, tensor in original.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def round_trip_one_rank() -> None:
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    groups = init_groups(ParallelConfig(), pick_device("auto"))

    @settings(max_examples=30, **QUICK)
    @given(shapes())
    def check(shape):
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(Path(folder), **shape)
            check_same(path, exported(path, ParallelConfig(), groups))

    check()


def round_trip_two_ranks(folders: list[str]) -> list[dict[str, torch.Tensor]]:

    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups, leave_layout

    results = []
    for layout in ({"tensor": 2}, {"pipeline": 2}):
        leave_layout()
        parallel = ParallelConfig(**layout)
        groups = init_groups(parallel, pick_device("auto"))
        results += [exported(Path(folder), parallel, groups) for folder in folders]
    return results


def test_random_shapes_round_trip_bit_for_bit():
    run_ranks(round_trip_one_rank, 1)


def test_random_shapes_round_trip_at_tp2_and_pp2(tmp_path):
    chosen: list[dict] = []

    @settings(max_examples=8, **QUICK)
    @given(shapes(ranks=2))
    def choose(shape):
        chosen.append(shape)

    choose()
    folders = [make_model(tmp_path / str(index), **shape) for index, shape in enumerate(chosen)]
    for results in run_ranks(round_trip_two_ranks, 2, [str(folder) for folder in folders]):
        for folder, result in zip(folders * 2, results, strict=True):
            check_same(folder, result)


@st.composite
def adapters(draw) -> dict:
    """Draw arguments of PEFT's ``LoraConfig``."""
    listed = st.lists(st.sampled_from([*LINEARS, "self_attn.v_proj", "layers.1.mlp.up_proj"]), min_size=1, unique=True)
    expression = st.sampled_from([r".*\.(q|v)_proj", r"model\.layers\.[12]\.mlp\.(gate|down)_proj", r".*_proj"])
    targets = draw(st.one_of(st.just("all-linear"), listed, expression))
    config = {
        "target_modules": targets,
        "r": draw(st.integers(1, 6)),
        "lora_alpha": draw(st.integers(1, 20)),
        "use_rslora": draw(st.booleans()),
        "exclude_modules": draw(st.sampled_from([None, ["o_proj"], ["layers.0.mlp.up_proj"], r".*layers\.2\..*"])),
    }
    keys = st.sampled_from(["q_proj", "down_proj", r"layers\.[01]\.self_attn\.[kv]_proj", "model.layers.2.mlp.up_proj"])
    config["rank_pattern"] = draw(st.dictionaries(keys, st.integers(1, 9), max_size=3))
    config["alpha_pattern"] = draw(st.dictionaries(keys, st.integers(1, 30), max_size=3))
    if isinstance(targets, list) and draw(st.booleans()):
        config["layers_to_transform"] = draw(st.one_of(st.integers(0, 2), st.just([1, 2])))
        config["layers_pattern"] = draw(st.sampled_from([None, "layers"]))
    return config


def random_adapters(folder: str) -> int:
    """Pass adapters from PEFT through megarl and back to PEFT; return how many there were."""
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    model = Path(folder)
    groups = init_groups(ParallelConfig(), pick_device("auto"))
    samples = make_samples(2, 131)
    done = []

    @settings(max_examples=25, **QUICK)
    @given(adapters(), st.integers(0, 10**6))
    def check(config, seed):
        with tempfile.TemporaryDirectory() as scratch:
            made, saved = Path(scratch) / "made", Path(scratch) / "saved"
            try:
                make_adapter(model, made, seed=seed, **config)
            except ValueError as error:
                assert "odules were" in str(error)  # PEFT too refuses a config that adapts nothing
                return
            results = through_megarl(model, made, saved, samples, groups)
            check_saved(made, saved)
            reference = load_reference(model, saved)
            for sample, logprobs in zip(samples, results, strict=True):
                expected = logprobs_of(reference, sample).detach()
                assert relative_error(torch.from_numpy(logprobs), expected) < 1e-5
            done.append(config)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    return len(done)


def through_megarl(model: Path, made: Path, saved: Path, samples: list, groups) -> list[np.ndarray]:
    """Load an adapter into a new model, save it, and return logprobs."""
    from megarl.lora import attach, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from tests.helpers.cases import make_config

    peft_config = load_peft_config(made)
    megatron = MegatronModel(make_config(model, {}).trainer, groups, attach(peft_config))
    megatron.load_adapter(made)
    megatron.adapter.save(saved)
    return megatron.forward(megatron.pack(samples))


def check_saved(made: Path, saved: Path) -> None:
    """Compare two directories: the same tensors bit for bit, and configs of the same meaning."""
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (made, saved))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (made, saved)]
    for config in configs:
        if isinstance(config["target_modules"], list):
            config["target_modules"] = sorted(config["target_modules"])
    differing = {key for key in configs[0] if configs[0][key] != configs[1].get(key)}
    assert not differing, [(key, configs[0][key], configs[1].get(key)) for key in differing]


def test_random_peft_adapters_come_back_and_compute_the_same(tmp_path):
    model = make_model(tmp_path / "model", "qwen3", tied=True, num_hidden_layers=3)
    [done] = run_ranks(random_adapters, 1, str(model))
    assert done >= 15


def test_a_folder_with_tensors_that_the_model_has_no_place_for_is_refused(tmp_path):
    model = make_model(tmp_path / "model", "llama", tied=False)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # old folders have them
    save_file(tensors, model / "model.safetensors")
    other = make_model(tmp_path / "other", "llama", tied=False)
    save_file(tensors | {"model.layers.3.self_attn.o_proj.bias": torch.ones(48)}, other / "model.safetensors")
    run_ranks(round_trip_two_ranks, 2, [str(model)])
    with pytest.raises(
        Exception,
        match=r"holds 'model.layers.3.self_attn.o_proj.bias', which the model of its config.json has no place",
    ):
        run_ranks(round_trip_two_ranks, 2, [str(other)])
