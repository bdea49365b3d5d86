# SPDX-License-Identifier: Apache-2.0
"""Train several adapters of one model in turn: each equals PEFT's, and no merge changes a weight."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict

from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.distributed.test_adapters import build
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

# Targets that partly overlap, other ranks, and one target that a whole pipeline stage lacks.
CONFIGS: dict[str, dict[str, Any]] = {
    "first": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "second": {"target_modules": ["v_proj", "up_proj", "lm_head"], "r": 3, "lora_alpha": 9},
    "frozen": {"target_modules": ["o_proj", "embed_tokens"], "layers_to_transform": [0], "r": 2},
}
ORDER = ("first", "second", "first", "first", "second")
LR = 5e-4


def samples_of(step: int) -> list:
    return make_samples(6, SHAPE["vocab_size"], seed=step)


def train_in_turn(folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On each rank, train two adapters in turn beside a frozen one, at every layout."""

    from megarl.config import ParallelConfig
    from megarl.errors import MegarlError
    from megarl.lora import apply_lora, load_peft_config
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups, leave_layout

    root, results = Path(folder), []
    for layout in layouts:
        leave_layout()
        groups = init_groups(ParallelConfig(**layout), pick_device("auto"))

        def attach(chunks: list, hf: Any, groups: Any) -> list:
            return [
                apply_lora(
                    chunks, load_peft_config(root / name), hf, name=name, trainable=name != "frozen", groups=groups
                )
                for name in CONFIGS
            ]

        model = build(root, groups, attach, layout)
        for name in CONFIGS:
            model.set_active(name)
            model.load_adapter(root / name)
        for step, name in enumerate(ORDER):
            model.set_active(name)
            samples = samples_of(step)
            model.forward_backward(model.pack(samples, np.full(len(samples), 0.05)), SurrogateLoss())
            if step == 1:
                model.set_active("first")
                with pytest.raises(MegarlError, match="adapter 'second' has a gradient that no update has used"):
                    model.optim_step(LR)
                model.set_active(name)
            model.optim_step(LR)
        batch, outputs = model.pack(samples_of(0)), {"base": model.forward(model.pack(samples_of(0)), adapter=False)}
        for name in CONFIGS:
            model.set_active(name)
            model.save_adapter(root / "saved" / name)
            outputs[name] = model.forward(batch)
            outputs[f"{name} version"] = model.version
            outputs[f"{name} tensors"] = {n: t.cpu() for n, t in model.export_weights(adapter_only=True)}
            outputs[f"{name} merged"] = merged_twice(model)
        outputs["touched"] = touched_by_merges(model)
        with pytest.raises(MegarlError, match="adapter 'frozen' is frozen"):
            model.forward_backward(batch, SurrogateLoss())
        with model.adapters["first"].activated():
            outputs["again"] = model.forward(batch)
        results.append(outputs)
    return results


def merged_twice(model: Any) -> dict[str, Any]:
    """Merge whole and in the changed blocks only: what the latter leaves out must be the base, bit for bit."""
    base = {name: tensor.clone() for name, tensor in model.export_weights(adapter_only=False)}
    whole = {name: tensor.clone() for name, tensor in model.export_merged()}
    sent = {name: tensor.clone() for name, tensor in model.export_merged(changed_only=True)}
    return {
        "sent": sorted(sent),
        "changed": sorted(name for name, tensor in whole.items() if not torch.equal(tensor, base[name])),
        "wrong": [name for name, tensor in whole.items() if not torch.equal(sent.get(name, base[name]), tensor)],
    }


def touched_by_merges(model: Any) -> list[str]:
    """Merge twenty times, and name the parameters of this rank, base and adapters, that are no longer the same bits."""
    named = [named for chunk in model.chunks for named in chunk.named_parameters()]
    before = [parameter.detach().clone() for _, parameter in named]
    for changed_only in (True, False) * 10:
        for _ in model.export_merged(changed_only):
            pass
    return [name for (name, parameter), old in zip(named, before, strict=True) if not torch.equal(parameter, old)]


def truth_of(folder: Path) -> dict[str, Any]:
    """Train with PEFT's add_adapter and set_adapter, and one AdamW for each adapter."""
    base = load_reference(folder / "model", None)
    options = {"is_trainable": True, "autocast_adapter_dtype": False}
    model = PeftModel.from_pretrained(base, folder / "first", adapter_name="first", **options)
    model.load_adapter(folder / "second", adapter_name="second", **options)
    model.load_adapter(folder / "frozen", adapter_name="frozen", autocast_adapter_dtype=False)
    optimizers = {}
    for name in ("first", "second"):
        model.set_adapter(name)
        parameters = [p for n, p in model.named_parameters() if p.requires_grad and name in n]
        optimizers[name] = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    for step, name in enumerate(ORDER):
        model.set_adapter(name)
        optimizers[name].zero_grad()
        for sample in samples_of(step):
            (-0.05 * sample.advantage * logprobs_of(model, sample).sum()).backward()
        torch.nn.utils.clip_grad_norm_(optimizers[name].param_groups[0]["params"], 1.0)
        optimizers[name].step()
    results: dict[str, Any] = {}
    with torch.no_grad():
        for name in CONFIGS:
            model.set_adapter(name)
            results[name] = [logprobs_of(model, sample).numpy() for sample in samples_of(0)]
            results[f"{name} tensors"] = get_peft_model_state_dict(
                model, adapter_name=name, save_embedding_layers=False
            )
        with model.disable_adapter():
            results["base"] = [logprobs_of(model, sample).numpy() for sample in samples_of(0)]
    return results


def test_adapters_trained_in_turn_equal_pefts(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    for seed, (name, config) in enumerate(CONFIGS.items()):
        make_adapter(tmp_path / "model", tmp_path / name, seed=seed, **config)
    expected = truth_of(tmp_path)
    for results in run_ranks(train_in_turn, 2, str(tmp_path), [{"tensor": 2}, {"pipeline": 2}]):
        for result in results:
            assert [result[f"{name} version"] for name in CONFIGS] == [3, 2, 0]
            for adapter in (*CONFIGS, "base"):
                for ours, theirs in zip(result[adapter], expected[adapter], strict=True):
                    assert relative_error(torch.from_numpy(ours), torch.from_numpy(theirs)) < 1e-5, adapter
            assert all(np.array_equal(a, b) for a, b in zip(result["again"], result["first"], strict=True))
            assert result["touched"] == []
            for name in CONFIGS:
                merged = result[f"{name} merged"]
                # What any of the adapters changes, since an engine may hold another one's; no norm of a layer.
                assert [sent for sent in merged["sent"] if "layers" not in sent] == ["lm_head.weight"]
                assert {sent.split(".")[3] for sent in merged["sent"] if "layers" in sent} == {"self_attn", "mlp"}
                assert merged["wrong"] == [] and set(merged["changed"]) < set(merged["sent"])
                assert ("lm_head.weight" in merged["changed"]) == (name == "second")
            for name in CONFIGS:
                ours, theirs = result[f"{name} tensors"], expected[f"{name} tensors"]
                assert ours.keys() == theirs.keys()
                assert max(relative_error(ours[n], t) for n, t in theirs.items()) < 1e-4, name
    again = load_reference(tmp_path / "model", tmp_path / "saved" / "second")
    assert relative_error(logprobs_of(again, samples_of(0)[0]), torch.from_numpy(expected["second"][0])) < 1e-4
