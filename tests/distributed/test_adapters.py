# SPDX-License-Identifier: Apache-2.0
"""Train several adapters on one model, and check what an adapter must not depend on: layout, TP rank, its presence."""

from pathlib import Path
from types import SimpleNamespace
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
from tests.helpers.cases import make_config
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


def build(folder: Path, groups: Any, attach: Any, layout: dict[str, Any]) -> Any:
    from megarl.model.megatron_model import MegatronModel

    train = {"weight_decay": 0.0, "max_grad_norm": 1.0} | layout.get("train", {})
    return MegatronModel(make_config(folder / "model", layout | {"train": train}).trainer, groups, attach)


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


def fresh_adapters(folder: str, layout: dict[str, Any], targets: list[str]) -> dict[str, torch.Tensor]:
    """Return a new adapter of one seed at a layout, whole and merged, and check what ``apply_lora`` refuses."""
    from peft import LoraConfig

    from megarl.config import ParallelConfig
    from megarl.errors import AdapterError
    from megarl.lora import apply_lora
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    groups = init_groups(ParallelConfig(**layout), pick_device("auto"))
    config = LoraConfig(r=4, target_modules=targets)
    model = build(Path(folder), groups, lambda c, hf, g: apply_lora(c, config, hf, seed=11, groups=g), layout)
    for settings, message in (
        ({}, "already has an adapter named 'default'"),
        ({"name": "a.b"}, "adapter name 'a.b' cannot be used"),
        ({"name": "late"}, "would never be updated"),
    ):
        with pytest.raises(AdapterError, match=message):
            apply_lora(model.chunks, config, model.hf_config, groups=groups, **settings)
    merged = {f"merged {name}": tensor.clone() for name, tensor in model.export_merged(changed_only=True)}
    return {name: tensor.clone() for name, tensor in model.adapter.export()} | merged


@pytest.mark.parametrize(
    ("family", "targets", "layout", "drawn"),
    [
        (
            "llama",
            ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"],
            {"tensor": 2, "pipeline": 2},
            4 * 5 + 2,
        ),
        (
            "qwen3_moe",
            ["v_proj", "gate", "gate_proj", "up_proj", "down_proj"],
            {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2},
            4 * (2 + 3 * 4),
        ),
    ],
    ids=["TP2xPP2", "TP2xDP2xEP2xETP2"],
)
def test_the_start_does_not_depend_on_the_layout(tmp_path, family, targets, layout, drawn):
    make_model(tmp_path / "model", family, tied=False)
    [alone] = run_ranks(fresh_adapters, 1, str(tmp_path), {}, targets)
    for result in run_ranks(fresh_adapters, 4, str(tmp_path), layout, targets):
        assert result.keys() == alone.keys()
        assert all(torch.equal(result[name], tensor) for name, tensor in alone.items())
    assert any("experts.3" in name or "lm_head" in name for name in alone if name.startswith("merged "))
    starts = [t.flatten()[0].item() for name, t in alone.items() if t.any() and not name.startswith("merged ")]
    assert len(starts) == len(set(starts)) == drawn


def drop_masks(folder: str) -> dict[str, list[torch.Tensor]]:
    """Return the masks of the adapters' dropout in one pass, call by call, with and without SP."""
    from peft import LoraConfig

    from megarl.config import ParallelConfig
    from megarl.lora import apply_lora
    from megarl.lora.layers import parallel_linear
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups, leave_layout

    dropout, results = torch.nn.functional.dropout, {}
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "lm_head"], lora_dropout=0.5)
    for sequence in (False, True):
        leave_layout()
        layout = {"tensor": 2, "sequence": sequence}
        groups = init_groups(ParallelConfig(**layout), pick_device("auto"), seed=3)
        model = build(Path(folder), groups, lambda c, hf, g: apply_lora(c, config, hf, groups=g), layout)
        masks: list[torch.Tensor] = []

        def recorded(inputs: torch.Tensor, probability: float, masks: list = masks) -> torch.Tensor:
            kept = dropout(inputs, probability)
            masks.append(kept != 0)
            return kept

        with pytest.MonkeyPatch.context() as patch:  # not torch's own F: the base model has dropouts too
            patch.setattr(parallel_linear, "F", SimpleNamespace(**vars(parallel_linear.F) | {"dropout": recorded}))
            model.forward_backward(model.pack(make_samples(2, SHAPE["vocab_size"]), np.ones(2)), SurrogateLoss())
            model.forward(model.pack(make_samples(2, SHAPE["vocab_size"])))
        results["SP" if sequence else "no SP"] = masks
    return results


def test_dropout_is_the_same_where_tp_ranks_hold_the_same_and_differs_where_they_do_not(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    first, second = run_ranks(drop_masks, 2, str(tmp_path))
    for sequence in ("no SP", "SP"):
        pairs = list(zip(first[sequence], second[sequence], strict=True))
        assert len(pairs) == 4 * 2 + 1  # q_proj and o_proj of four parallel_linear, then lm_head; none without training
        for call, (ours, theirs) in enumerate(pairs):
            column = call == len(pairs) - 1 or call % 2 == 0
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs) == (column and sequence == "no SP"), (sequence, call)
            assert abs(ours.float().mean() - 0.5) < 0.1


def operations(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Return the operations of a forward pass without an adapter, with it disabled, and with it active."""
    from peft import LoraConfig
    from torch.utils._python_dispatch import TorchDispatchMode

    from megarl.config import ParallelConfig
    from megarl.lora import apply_lora
    from megarl.model.step.packing import micro_batches
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    groups = init_groups(ParallelConfig(), pick_device("auto"))
    before: list[str] = []

    def one_pass(chunk: Any) -> list[str]:
        from megarl.model.step.packing import pack

        batch = pack(make_samples(2, SHAPE["vocab_size"]), None, max_tokens=128)
        [item] = micro_batches(batch, 0, groups.device)
        with Recorder() as recorder, torch.no_grad():
            hidden = chunk(item.tokens_T[None], item.positions_T[None], None, packed_seq_params=item.packed)
            assert bool(chunk.output_deltas(hidden, item.response_R)) == (active[0])
        return recorder.calls

    active = [False]

    def attach(chunks: list, hf: Any, groups: Any) -> Any:
        one_pass(chunks[0])  # mcore caches its RoPE table
        before.extend(one_pass(chunks[0]))
        targets = ["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
        return apply_lora(chunks, LoraConfig(r=4, target_modules=targets), hf, groups=groups)

    model = build(Path(folder), groups, attach, {})
    with model.adapter.disabled():
        disabled = one_pass(model.chunks[0])
    active[0] = True
    return before, disabled, one_pass(model.chunks[0])


def test_a_disabled_adapter_runs_no_operation(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    [(before, disabled, active)] = run_ranks(operations, 1, str(tmp_path))
    assert disabled == before
    assert len(active) > len(before) + 4 * 4
