# SPDX-License-Identifier: Apache-2.0
"""Check what an adapter must not depend on: the layout, the TP rank, and whether it is there at all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.cases import make_config
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks


def build(folder: Path, groups: Any, attach: Any, layout: dict[str, Any]) -> Any:
    from megarl.model.megatron_model import MegatronModel

    train = {"weight_decay": 0.0, "max_grad_norm": 1.0} | layout.get("train", {})
    return MegatronModel(make_config(folder / "model", layout | {"train": train}).trainer, groups, attach)


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
    from megarl.lora.layers import dropout as dropping
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
            patch.setattr(dropping, "F", SimpleNamespace(**vars(dropping.F) | {"dropout": recorded}))
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
    from megarl.model.step.micro_batch import micro_batches
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
