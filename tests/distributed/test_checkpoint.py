"""Promise 6: N + M steps equal N steps, a checkpoint, M steps: bitwise in the same layout, closely in another."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import AdapterError, CheckpointError
from tests.distributed.test_parity import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import make_adapter, make_samples, relative_error

STEPS = 2


def build(folder: Path, layout: dict[str, Any], dtype: str = "float32", model: str = "model", **lora: Any):
    """A model on this rank; in bf16 with dropout, so that the random states matter."""
    from peft import LoraConfig

    from megarl.config import parse_config
    from megarl.lora import apply_lora
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    config = parse_config(
        {
            "model": {"path": str(folder / model), "dtype": dtype},
            "task": {"name": "arithmetic"},
            "parallel": layout,
            "train": {"micro_batch_tokens": 64, "prompts_per_step": 4},
            "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
        }
    )
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1 if dtype == "bfloat16" else 0.0,
        "target_modules": "all-linear",
    } | lora
    groups = init_groups(config.parallel, pick_device("auto"), seed=5)
    return MegatronModel(config, groups, lambda c, hf, g: apply_lora(c, LoraConfig(**settings), hf, seed=7, groups=g))


def train(model: Any, seeds: range) -> None:
    """One update per seed, on that seed's samples."""
    for seed in seeds:
        samples = make_samples(8, SHAPE["vocab_size"], seed=seed)
        model.forward_backward(model.pack(samples, np.full(8, 0.05)), SurrogateLoss())
        model.optim_step(5e-4)


def everything(model: Any) -> dict[str, torch.Tensor]:
    """Adapter, main weights, moments and random states of this rank."""
    from megarl.model.checkpoint import _rng_state

    found = {f"adapter {n}": p.data.clone() for n, p in model.adapter.parameters()}
    found |= {f"main {n}": t.clone() for n, t in model.optimizer.main_weights().items()}
    for kind, tensors in model.optimizer.moments().items():
        found |= {f"{kind} {n}": t.clone() for n, t in tensors.items()}
    return found | {f"rng {n}": t for n, t in _rng_state().items()} | {"steps": torch.tensor(model.optimizer.steps())}


def save_and_go_on(folder: str, layout: dict[str, Any], dtype: str) -> dict:
    """Train, save, train on; what an uninterrupted run ends with."""
    model = build(Path(folder), layout, dtype)
    train(model, range(STEPS))
    model.save_checkpoint(Path(folder) / "checkpoint", {"cursor": 17})
    train(model, range(STEPS, 2 * STEPS))
    return {"state": everything(model), "whole": {n: t.clone() for n, t in model.export_weights(True)}}


def resume(folder: str, layout: dict[str, Any], dtype: str) -> dict:
    """In a fresh process: load and train on."""
    model = build(Path(folder), layout, dtype)
    extra = model.load_checkpoint(Path(folder) / "checkpoint")
    assert (extra, model.version) == ({"cursor": 17}, STEPS)
    train(model, range(STEPS, 2 * STEPS))
    return {"state": everything(model), "whole": {n: t.clone() for n, t in model.export_weights(True)}}


@pytest.mark.parametrize(
    ("layout", "dtype", "elsewhere"),
    [({"pipeline": 2}, "bfloat16", None), ({"tensor": 2}, "float32", {"data": 2})],
    ids=["PP2-bf16", "TP2-fp32"],
)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, layout, dtype, elsewhere):
    make_model(tmp_path / "model", "qwen3", tied=True)
    straight = run_ranks(save_and_go_on, 2, str(tmp_path), layout, dtype)
    resumed = run_ranks(resume, 2, str(tmp_path), layout, dtype)
    for a, b in zip(straight, resumed, strict=True):
        assert a["state"].keys() == b["state"].keys()
        different = [name for name in a["state"] if not torch.equal(a["state"][name], b["state"][name])]
        assert not different, different[:5]
    if elsewhere:
        other = run_ranks(resume, 2, str(tmp_path), elsewhere, dtype)[0]["whole"]
        errors = {name: relative_error(other[name], tensor) for name, tensor in straight[0]["whole"].items()}
        assert max(errors.values()) < 1e-4, max(errors, key=errors.get)


def load_elsewhere(folder: str, layout: dict[str, Any]) -> dict:
    """Load and hand back the optimizer's whole state, by name."""
    from megarl.model.checkpoint import _optimizer_tensors
    from megarl.model.streaming import stream_full

    model = build(Path(folder), layout)
    model.load_checkpoint(Path(folder) / "checkpoint")
    kinds = _optimizer_tensors(model.adapter, model.optimizer)
    whole = {f"{k}.{n}": t.clone() for k, ts in kinds.items() for n, t in stream_full(ts, model.groups)}
    failures = {name: _failure(model, Path(folder) / name) for name in ("truncated", "empty", "other-format")}
    failures["exists"] = _failure(model, Path(folder) / "checkpoint", save=True)
    failures["rank"] = _failure_of(
        lambda: build_other(folder, layout, r=8).load_checkpoint(Path(folder) / "checkpoint")
    )
    failures["targets"] = _failure_of(
        lambda: build_other(folder, layout, target_modules=["q_proj"]).load_checkpoint(Path(folder) / "checkpoint")
    )
    failures["model"] = _failure_of(
        lambda: build_other(folder, layout, model="other").load_checkpoint(Path(folder) / "checkpoint")
    )
    return {"whole": whole, "failures": failures}


def build_other(folder: str, layout: dict[str, Any], **changes: Any):
    return build(Path(folder), layout, **changes)


def _failure(model: Any, path: Path, save: bool = False) -> tuple[str, str]:
    return _failure_of(lambda: model.save_checkpoint(path) if save else model.load_checkpoint(path))


def _failure_of(action: Any) -> tuple[str, str]:
    try:
        action()
    except (CheckpointError, AdapterError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_state_moves_between_layouts_bit_for_bit_and_what_does_not_fit_is_refused(tmp_path):
    from safetensors.torch import load_file

    make_model(tmp_path / "model", "qwen3", tied=True)
    make_model(tmp_path / "other", "qwen3", tied=True, num_hidden_layers=2)
    run_ranks(save_and_go_on, 2, str(tmp_path), {"tensor": 2}, "float32")
    for name in ("truncated", "empty", "other-format"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / name)
    optimizer = tmp_path / "truncated" / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    (tmp_path / "empty" / "state.json").unlink()
    (tmp_path / "other-format" / "state.json").write_text('{"format": 99}')
    results = run_ranks(load_elsewhere, 2, str(tmp_path), {"pipeline": 2})
    saved = load_file(tmp_path / "checkpoint" / "optimizer.safetensors")
    for result in results:
        assert result["whole"].keys() == saved.keys()
        assert all(torch.equal(result["whole"][name], tensor) for name, tensor in saved.items())
        failures = result["failures"]
        assert failures["truncated"][0] == "CheckpointError" and "damaged" in failures["truncated"][1]
        assert failures["empty"][0] == "CheckpointError" and "not a complete checkpoint" in failures["empty"][1]
        assert failures["other-format"][0] == "CheckpointError" and "format 99" in failures["other-format"][1]
        assert failures["exists"][0] == "CheckpointError" and "exists already" in failures["exists"][1]
        assert failures["rank"][0] == "AdapterError" and "(4, 2.0) in the file" in failures["rank"][1]
        assert failures["targets"][0] == "AdapterError" and "adapted in the file but not here" in failures["targets"][1]
        assert failures["model"][0] == "CheckpointError" and "another model" in failures["model"][1]


def load_bad_adapters(folder: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """What loading each adapter says, and that it changed nothing."""
    model = build(Path(folder), {})
    before = {n: p.data.clone() for n, p in model.adapter.parameters()}
    failures = {name: _failure_of(lambda name=name: model.load_adapter(Path(folder) / name)) for name in names}
    assert all(torch.equal(before[n], p.data) for n, p in model.adapter.parameters())
    return failures


def test_bad_adapters_are_refused_by_name_and_change_nothing(tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    make_model(tmp_path / "model", "qwen3", tied=True)
    make_adapter(tmp_path / "model", tmp_path / "good")
    weights = load_file(tmp_path / "good" / "adapter_model.safetensors")
    first = sorted(weights)[0]

    def variant(name: str, tensors: dict | None = None, **config: Any) -> None:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        if tensors is not None:
            save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    variant("shape", weights | {first: weights[first][:, :-1].contiguous()})
    variant("missing", {n: t for n, t in weights.items() if n != first})
    variant("extra", weights | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)})
    variant("target", target_modules=["q_proj", "kk_proj"])
    variant("dora", use_dora=True)
    variant("not-lora", peft_type="IA3")
    variant("truncated")
    file = tmp_path / "truncated" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    names = ["shape", "missing", "extra", "target", "not-lora", "truncated", "nowhere"]
    [failures] = run_ranks(load_bad_adapters, 1, str(tmp_path), names)
    expected = {
        "shape": "has shape",
        "missing": "lacks",
        "extra": "which nothing here uses",
        "target": "'kk_proj', which the model lacks; did you mean 'k_proj'?",
        "not-lora": "supported is 'LORA'",
        "truncated": "truncated or damaged",
        "nowhere": "does not exist",
    }
    for name, message in expected.items():
        assert failures[name][0] == "AdapterError", (name, failures[name])
        assert message in failures[name][1], (name, failures[name])
