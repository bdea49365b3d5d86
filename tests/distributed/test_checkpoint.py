# SPDX-License-Identifier: Apache-2.0
"""Promise 6: N + M steps equal N steps, a checkpoint and M steps: bitwise at the same layout, closely at another."""

import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import AdapterError, CheckpointError, UnsupportedError
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build, everything, train

STEPS = 2
DISTRIBUTED = {"train": {"distributed_optimizer": True}}


def save_and_go_on(folder: str, layout: dict[str, Any], dtype: str) -> dict:
    """Train, save, train on; return the final state of the uninterrupted run."""
    model = build(Path(folder), layout, dtype)
    train(model, range(STEPS))
    model.save_checkpoint(Path(folder) / "checkpoint", {"cursor": 17})
    train(model, range(STEPS, 2 * STEPS))
    return {"state": everything(model), "whole": {n: t.clone() for n, t in model.export_weights(True)}}


def resume(folder: str, layout: dict[str, Any], dtype: str) -> dict:
    """Load in a fresh process, and train on."""
    model = build(Path(folder), layout, dtype)
    extra = model.load_checkpoint(Path(folder) / "checkpoint")
    assert (extra, model.version) == ({"cursor": 17}, STEPS)
    train(model, range(STEPS, 2 * STEPS))
    return {"state": everything(model), "whole": {n: t.clone() for n, t in model.export_weights(True)}}


@pytest.mark.parametrize(
    ("family", "layout", "dtype", "elsewhere"),
    [
        pytest.param("qwen3", {"pipeline": 2}, "bfloat16", None, marks=pytest.mark.long),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}, "bfloat16", None),
        ("qwen3", {"tensor": 2}, "float32", {"data": 2} | DISTRIBUTED),
        ("qwen3", {"data": 2} | DISTRIBUTED, "bfloat16", {"data": 2}),
        pytest.param("qwen3", {"data": 2}, "bfloat16", {"data": 2} | DISTRIBUTED, marks=pytest.mark.long),
        ("mixtral", {"data": 2, "expert": 2}, "float32", None),
    ],
    ids=["PP2-bf16", "PP2xVPP2-bf16", "TP2-fp32", "distributed-bf16", "plain-bf16", "experts-fp32"],
)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, family, layout, dtype, elsewhere):
    make_model(tmp_path / "model", family, tied=family == "qwen3")
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


def save_in_background(folder: str, layout: dict[str, Any]) -> dict:
    """Train on while a save is held up, then make saves fail; return what each call raises."""
    from megarl.model.checkpoint import training_state

    gate, save_file = threading.Event(), training_state.save_file
    training_state.save_file = lambda *args: gate.wait(60) and save_file(*args)
    model = build(Path(folder), layout, "bfloat16")
    first, second, third, fourth = (Path(folder) / name for name in ("first", "second", "third", "fourth"))
    train(model, range(STEPS))
    before = everything(model)
    model.save_checkpoint(first, {"cursor": 1})
    train(model, range(STEPS, 2 * STEPS))
    assert not first.exists()
    gate.set()
    model.save_checkpoint(second)
    assert first.exists()
    model.finish_checkpoint()
    after, extra = everything(model), model.load_checkpoint(first)
    restored = everything(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if model.groups.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the disk is full
    model.save_checkpoint(third)
    failures = {"save": _failure(model, fourth, save=True)}
    model.save_checkpoint(third)
    failures["load"] = _failure(model, second)
    model.save_checkpoint(third)
    failures["finish"] = _failure_of(model.finish_checkpoint)
    if model.groups.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not third.exists() and not fourth.exists()
    model.save_checkpoint(third, {"cursor": 3})
    assert model.load_checkpoint(third) == {"cursor": 3}
    return {"before": before, "after": after, "restored": restored, "extra": extra, "failures": failures}


def test_training_goes_on_while_a_save_is_written_and_a_failure_reaches_every_rank(tmp_path):
    make_model(tmp_path / "model", "qwen3", tied=True)
    for rank, result in enumerate(run_ranks(save_in_background, 2, str(tmp_path), {"data": 2} | DISTRIBUTED)):
        assert result["extra"] == {"cursor": 1}
        before, restored, after = (result[name] for name in ("before", "restored", "after"))
        assert [name for name in before if not torch.equal(before[name], restored[name])] == []
        assert [name for name in before if torch.equal(before[name], after[name])] != list(before)
        for call, failure in result["failures"].items():
            if call == "finish" and rank > 0:  # only rank 0 writes
                assert failure == ("", "")
                continue
            assert failure[0] == "CheckpointError", call
            assert "third' cannot be written" in failure[1] and "File too large" in failure[1], call
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "first", "model", "second", "third"]


def load_elsewhere(folder: str, layout: dict[str, Any]) -> dict:
    """Load, and return the optimizer's whole state by name."""
    from megarl.model.checkpoint.training_state import _optimizer_tensors
    from megarl.model.weights.streaming import stream_full

    model = build(Path(folder), layout)
    model.load_checkpoint(Path(folder) / "checkpoint")
    kinds = _optimizer_tensors(model.adapter, model.optimizer)
    whole = {f"{k}.{n}": t.clone() for k, ts in kinds.items() for n, t in stream_full(ts, model.groups)}
    failures = {
        name: _failure(model, Path(folder) / name) for name in ("truncated", "empty", "other-format", "flipped")
    }
    failures["exists"] = _failure(model, Path(folder) / "checkpoint", save=True)
    failures["rank"] = _failure_of(
        lambda: build_other(folder, layout, r=8).load_checkpoint(Path(folder) / "checkpoint")
    )
    failures["targets"] = _failure_of(
        lambda: build_other(folder, layout, target_modules=["q_proj"]).load_checkpoint(Path(folder) / "checkpoint")
    )
    for model in ("other", "twin"):
        failures[model] = _failure_of(
            lambda model=model: build_other(folder, layout, model=model).load_checkpoint(Path(folder) / "checkpoint")
        )
    return {"whole": whole, "failures": failures}


def build_other(folder: str, layout: dict[str, Any], **changes: Any):
    return build(Path(folder), layout, **changes)


def _failure(model: Any, path: Path, save: bool = False) -> tuple[str, str]:
    return _failure_of(lambda: model.save_checkpoint(path) if save else model.load_checkpoint(path))


def _failure_of(action: Any) -> tuple[str, str]:
    try:
        action()
    except (CheckpointError, AdapterError, UnsupportedError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("family", "layout", "elsewhere"),
    [
        ("qwen3", {"tensor": 2}, {"pipeline": 2}),
        ("mixtral", {"data": 2, "expert": 2} | DISTRIBUTED, {"tensor": 2, "expert_tensor": 2} | DISTRIBUTED),
    ],
    ids=["dense", "experts-distributed"],
)
def test_state_moves_between_layouts_bit_for_bit_and_what_does_not_fit_is_refused(tmp_path, family, layout, elsewhere):
    from safetensors.torch import load_file

    make_model(tmp_path / "model", family, tied=True)
    make_model(tmp_path / "other", family, tied=True, num_hidden_layers=2)
    make_model(tmp_path / "twin", family, tied=True, seed=1)
    run_ranks(save_and_go_on, 2, str(tmp_path), layout, "float32")
    for name in ("truncated", "empty", "other-format", "flipped"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / name)
    optimizer = tmp_path / "truncated" / "optimizer.safetensors"
    optimizer_bytes = optimizer.read_bytes()
    optimizer.write_bytes(optimizer_bytes[:-100])
    flipped = tmp_path / "flipped" / "optimizer.safetensors"
    flipped.write_bytes(optimizer_bytes[:-1] + bytes([optimizer_bytes[-1] ^ 1]))
    (tmp_path / "empty" / "state.json").unlink()
    (tmp_path / "other-format" / "state.json").write_text('{"format": 99}')
    results = run_ranks(load_elsewhere, 2, str(tmp_path), elsewhere)
    saved = load_file(tmp_path / "checkpoint" / "optimizer.safetensors")
    for result in results:
        assert result["whole"].keys() == saved.keys()
        assert all(torch.equal(result["whole"][name], tensor) for name, tensor in saved.items())
        failures = result["failures"]
        assert failures["truncated"][0] == "CheckpointError" and "damaged" in failures["truncated"][1]
        assert failures["flipped"][0] == "CheckpointError"
        assert "optimizer.safetensors: tensor 'main." in failures["flipped"][1]
        assert failures["empty"][0] == "CheckpointError" and "not a complete checkpoint" in failures["empty"][1]
        assert failures["other-format"][0] == "CheckpointError" and "format 99" in failures["other-format"][1]
        assert failures["exists"][0] == "CheckpointError" and "exists already" in failures["exists"][1]
        assert failures["rank"][0] == "AdapterError" and "(4, 2.0) in the file" in failures["rank"][1]
        assert failures["targets"][0] == "AdapterError" and "adapted in the file but not here" in failures["targets"][1]
        assert failures["other"][0] == "CheckpointError"
        assert "num_hidden_layers in its config.json was 4, and is 2; set model.path" in failures["other"][1]
        assert failures["twin"][0] == "CheckpointError"
        assert "'model.embed_tokens.weight' had other values; set model.path" in failures["twin"][1]


def load_bad_adapters(folder: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """Return what loading each adapter raises, and check that it changed nothing."""
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
    names = ["shape", "missing", "extra", "target", "dora", "not-lora", "truncated", "nowhere"]
    [failures] = run_ranks(load_bad_adapters, 1, str(tmp_path), names)
    expected = {
        "shape": "has shape",
        "missing": "lacks",
        "extra": "which nothing here uses",
        "target": "'kk_proj', which the model lacks; did you mean 'k_proj'?",
        "dora": "use_dora is True",
        "not-lora": "supported is 'LORA'",
        "truncated": "truncated or damaged",
        "nowhere": "does not exist",
    }
    for name, message in expected.items():
        assert failures[name][0] == ("UnsupportedError" if name == "dora" else "AdapterError"), (name, failures[name])
        assert message in failures[name][1], (name, failures[name])


def refused_checkpoint(folder: str) -> str:
    """Return the error of saving a model whose base weights are not those of its folder."""
    from megarl.build import build_model

    model = build_model(folder, fill_base=lambda chunks, path, hf_config, groups: None)
    with pytest.raises(UnsupportedError) as refused:
        model.save_checkpoint(Path(folder) / "checkpoint")
    return str(refused.value)


def test_a_checkpoint_needs_the_folder_of_the_base_weights(tmp_path):
    make_model(tmp_path, "qwen3", tied=False)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    [message] = run_ranks(refused_checkpoint, 1, str(tmp_path))
    assert "save_adapter writes its adapter" in message
