# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added together are those that mcore adds one by one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from megarl.model.megatron_model import MegatronModel
from megarl.model.optimizer import ddp, summing_ddp
from megarl.parallel import gradient_sums
from megarl.parallel.groups import leave_layout
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.aliased import aliased
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import batch_of

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "block": {"recompute": "full", "recompute_layers": 1},
}
SAMPLES = 12


class Stop(Exception):
    """Ends a backward pass."""


def gradients_of(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Return the gradients of a batch of several micro-batches, and zero them."""
    batch = batch_of(model, 0, SAMPLES)
    assert len(batch.plan[0]) > 2
    model.forward_backward(batch, SurrogateLoss())
    found = {name: tensor.clone() for name, tensor in model.gradients().items()}
    assert all(parameter.grad is None for _, parameter in model.adapter.parameters())
    model._drop_gradient()
    return found


def after_a_failure(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Return the gradients after a backward pass that fails halfway."""

    def fail(gradient: torch.Tensor) -> None:
        raise Stop

    def watch(module: Any, inputs: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(fail)

    hook = model.chunks[0].decoder.layers[0].register_forward_hook(watch)
    with pytest.raises(Stop):
        model.forward_backward(batch_of(model, 1, SAMPLES), SurrogateLoss())
    hook.remove()
    model._drop_gradient()
    return gradients_of(model)


def build_with(kind: type, folder: Path, train: dict[str, Any]) -> MegatronModel:
    """Return a model wrapped in a kind of mcore's DDP, with random matrices."""
    leave_layout()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "SummingDDP", kind)
        model = build(folder, {"train": train}, "bfloat16", "qwen3", lora_dropout=0.0)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in model.adapter.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    return model


def each_way(folder: str, small: int, waiting: int) -> dict[str, dict[str, bool]]:
    """Return, for each kind of recomputation, which ways give the same bits as mcore's hooks."""
    gradient_sums.SMALL, summing_ddp.WAITING = small, waiting
    found = {}
    for name, train in RECOMPUTE.items():
        truth = gradients_of(build_with(DistributedDataParallel, Path(folder), train))
        assert all(tensor.any() for tensor in truth.values())
        model = build_with(summing_ddp.SummingDDP, Path(folder), train)
        ways = {"together": gradients_of(model), "after a failure": after_a_failure(model)}
        with aliased():
            ways["on aliases"] = gradients_of(build_with(summing_ddp.SummingDDP, Path(folder), train))
        found[name] = {
            way: all(torch.equal(result[key], tensor) for key, tensor in truth.items()) for way, result in ways.items()
        }
    return found


@pytest.mark.parametrize(("small", "waiting"), [(2**20, 2**24), (200, 2**24), (2**20, 600)], ids=str)
def test_gradients_are_those_of_mcore(tmp_path, small, waiting):
    make_model(tmp_path / "qwen3", "qwen3", tied=False, dtype="bfloat16")
    [found] = run_ranks(each_way, 1, str(tmp_path), small, waiting)
    assert found == {name: dict.fromkeys(("together", "after a failure", "on aliases"), True) for name in RECOMPUTE}
