# SPDX-License-Identifier: Apache-2.0
"""Test what a model of either back end does with gradients that are given up, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.build import build_model
from megarl.errors import DataError, UnsupportedError
from megarl.loss.base import LossOutput
from megarl.model.optimizer.gradient_record import GradientError
from megarl.model.trained_model import TrainedModel
from megarl.parallel.groups import destroy_groups
from megarl.types import Sample
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model

BACK_ENDS = ("local", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", tied=True)


@pytest.fixture(params=BACK_ENDS)
def model(folder: Path, request: pytest.FixtureRequest) -> Iterator[TrainedModel]:
    yield built(folder, request.param)
    destroy_groups()


def built(folder: Path, backend: str = "local", parallel: dict[str, int] | None = None, **model: Any) -> TrainedModel:
    return build_model(
        {"path": str(folder), "dtype": "float32", "backend": backend} | model,
        lora={"r": 4},
        parallel=parallel,
        train={"device": "cpu", "micro_batch_tokens": 128},
    )


def batch_of(model: TrainedModel, seed: int) -> Any:
    return model.pack(make_samples(4, SHAPE["vocab_size"], seed=seed), np.full(4, 0.05))


def step(model: TrainedModel, seed: int) -> float:
    model.forward_backward(batch_of(model, seed), SurrogateLoss())
    return model.optim_step(1e-3)["grad_norm"]


def test_a_step_that_is_given_up_leaves_nothing_in_the_next_one(model: TrainedModel, tmp_path: Path) -> None:
    step(model, 0)
    model.save_checkpoint(tmp_path / "checkpoint")
    model.finish_checkpoint()
    model.save_adapter(tmp_path / "adapter")
    wanted = step(model, 1)
    for load in (
        lambda: model.load_checkpoint(tmp_path / "checkpoint"),
        lambda: model.load_adapter(tmp_path / "adapter"),
    ):
        model.forward_backward(batch_of(model, 2), SurrogateLoss())
        load()
        assert step(model, 1) == pytest.approx(wanted, rel=1e-6)


def test_after_a_gradient_that_is_not_finite_nothing_is_pending(model: TrainedModel) -> None:
    def broken(logprobs: torch.Tensor, tokens: Any) -> LossOutput:
        return LossOutput(logprobs.sum() * torch.nan, {})

    model.forward_backward(batch_of(model, 0), broken)
    with pytest.raises(GradientError, match="not updated"):
        model.optim_step(1e-3)
    assert model._pending is None
    assert np.isfinite(step(model, 1))


@pytest.mark.parametrize("token", [-3, SHAPE["vocab_size"], 5000])
def test_tokens_outside_the_vocabulary_are_refused_by_sample(model: TrainedModel, token: int) -> None:
    samples = [Sample(np.array([5, wrong, 9, 11]), np.array([False, False, True, True])) for wrong in (7, token)]
    with pytest.raises(DataError, match=rf"sample 1 holds token {token}, but the model's vocab_size is"):
        model.pack(samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "transformers"}, "model.backend = 'transformers'"),
        ({"parallel": {"context": 2}}, "parallel.context = 2"),
        ({"family": "mistral"}, "model_type of config.json = 'mistral'"),
    ],
)
def test_what_bitwise_layers_would_compute_otherwise_is_refused_by_build_model_too(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.build.init_groups", lambda *_, **__: None)  # one process has no second rank
    folder = make_model(tmp_path / "model", changes.pop("family", "llama"), tied=False)
    with pytest.raises(UnsupportedError, match=message):
        built(folder, numerics="bitwise", **changes)
