# SPDX-License-Identifier: Apache-2.0
"""Check that a gradient that is not finite on one rank changes nothing on any, and that clipping scales gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build, everything

DATA = {"data": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("float32", DATA),
    ("bfloat16", DATA),
    ("bfloat16", DATA | {"train": {"distributed_optimizer": True}}),
    ("experts", DATA | {"expert": 2}),
]
LR = 1e-3


def break_one_step(folder: str) -> None:
    """On each rank, check that three steps equal two with a step of a broken gradient between them."""
    from megarl.parallel.groups import leave_layout

    for name, layout in CASES:
        leave_layout()
        dropout = {"lora_dropout": 0.0}
        dtype = "float32" if name == "float32" else "bfloat16"
        whole, broken = (build(Path(folder), layout, dtype, name, **dropout) for _ in range(2))
        for model in (whole, broken):
            take_step(model, 0)
        before = state_of(broken)
        for value in (float("nan"), float("inf")):
            gradient(broken, 1)
            if broken.groups.rank == 1:
                next(iter(broken.optimizer.parameters.values())).main_grad.view(-1)[-1] = value
            with pytest.raises(FloatingPointError, match="the adapter was not updated"):
                broken.optim_step(LR)
            assert_same(state_of(broken), before, name)
        for model in (whole, broken):
            take_step(model, 2)
        after = state_of(broken)
        assert_same(after, state_of(whole), name)
        assert any(not torch.equal(after[key], before[key]) for key in before)


def gradient(model: Any, step: int) -> None:
    samples = make_samples(4, SHAPE["vocab_size"], seed=step)
    model.forward_backward(model.pack(samples, np.full(len(samples), 0.05)), SurrogateLoss())


def take_step(model: Any, step: int) -> None:
    gradient(model, step)
    assert model.optim_step(LR)["grad_norm"] > 0


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Return everything that an update changes on this rank."""
    shards = model.optimizer._shards.values()
    counts = {f"count {index}": shard.owner.state[shard.held]["step"].clone() for index, shard in enumerate(shards)}
    return everything(model) | counts


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert actual.keys() == expected.keys()
    assert not [key for key in actual if not torch.equal(actual[key], expected[key])], case


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for dtype in ("float32", "bfloat16"):
        make_model(folder / dtype, "qwen3", tied=True, dtype=dtype)
    make_model(folder / "experts", "mixtral", tied=False, dtype="bfloat16", num_hidden_layers=2)
    return folder


def test_a_gradient_that_is_not_finite_changes_nothing(models):
    run_ranks(break_one_step, 2, str(models))


def count(folder: str) -> None:
    """On each rank, compare the count of matrices with a gradient with the whole gradient, at several layouts."""
    from megarl.parallel.groups import leave_layout

    layouts: list[tuple[str, dict[str, Any]]] = [
        *(
            (name, DATA | {"train": {"distributed_optimizer": d}})
            for name in ("float32", "bfloat16")
            for d in (False, True)
        ),
        ("float32", {"tensor": 2}),
        ("bfloat16", {"pipeline": 2}),
        ("experts", DATA | {"expert": 2, "train": {"distributed_optimizer": True}}),
        ("experts", DATA | {"expert": 2}),
    ]
    for name, layout in layouts:
        leave_layout()
        model = build(Path(folder), layout, "float32" if name == "float32" else "bfloat16", name, lora_dropout=0.0)
        shares = []
        for step in range(3):
            gradient(model, step)
            nonzero = {key: bool((tensor != 0).any()) for key, tensor in model.gradients().items()}
            measured = model.optim_step(LR)
            assert (measured["grad_tensors"], measured["adapter_tensors"]) == (sum(nonzero.values()), len(nonzero))
            idle = model.optimizer.coverage.without_gradient()
            assert idle == sorted(key for key, found in nonzero.items() if not found)
            shares.append(measured["grad_tensors"] / len(nonzero))
        updates, never = model.optimizer.coverage.never()
        assert updates == 3 and set(never) <= set(idle) and (name == "experts" or not never)
        assert shares[0] <= 0.5  # B is 0 before the first update, so A has no gradient
        assert name == "experts" or shares[1:] == [1.0, 1.0]
        assert model.optim_step(LR)["grad_tensors"] == 0
        assert model.optimizer.coverage.without_gradient() == idle, (
            "a step without a gradient says nothing of the others"
        )


def test_matrices_with_a_gradient_are_counted_at_every_layout(models):
    run_ranks(count, 2, str(models))


def clip(folder: str) -> list[torch.Tensor]:
    """Make one update at each of three limits, and compute the same with torch."""
    results = []
    for limit in (0.0, 1e-3, 1e3):
        model = build(Path(folder), {"train": {"max_grad_norm": limit}}, "float32", "float32", lora_dropout=0.0)
        gradient(model, 0)
        weights = {name: weight.detach().clone() for name, weight in model.optimizer.parameters.items()}
        for name, tensor in model.gradients().items():
            weights[name].grad = tensor.clone()
        train = model.config.train
        reference = torch.optim.AdamW(
            weights.values(), LR, (train.adam_beta1, train.adam_beta2), train.adam_eps, train.weight_decay
        )
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), limit or float("inf"))
        assert norm > 0.1
        reference.step()
        assert abs(model.optim_step(LR)["grad_norm"] / float(norm) - 1) < 1e-6
        for name, moment in model.optimizer.moments()["exp_avg"].items():
            torch.testing.assert_close(moment, reference.state[weights[name]]["exp_avg"], rtol=1e-5, atol=1e-10)
            torch.testing.assert_close(model.optimizer.parameters[name].detach(), weights[name], rtol=1e-6, atol=1e-7)
        results.append(torch.cat([moment.flatten() for moment in model.optimizer.moments()["exp_avg"].values()]).norm())
    return results


def test_clipping_is_torchs(tmp_path):
    make_model(tmp_path / "float32", "qwen3", tied=True)
    [(unlimited, clipped, loose)] = run_ranks(clip, 1, str(tmp_path))
    assert clipped < 0.1 * unlimited and abs(loose / unlimited - 1) < 1e-6
