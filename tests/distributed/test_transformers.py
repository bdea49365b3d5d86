# SPDX-License-Identifier: Apache-2.0
"""Train a model of transformers on two data-parallel ranks, its base whole or sharded, as on one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.verify.inputs.samples import make_samples
from tests.helpers.architectures import SIZES, write_model
from tests.helpers.ranks import run_ranks


def work(folder: Path, train: dict[str, Any], data: int) -> dict[str, Any]:
    """Make three updates; return what one rank sees of the model."""
    from megarl.build import build_model
    from megarl.parallel.groups import destroy_groups
    from megarl.verify.reference.surrogate_loss import SurrogateLoss

    model: Any = build_model(
        {"path": str(folder / "model"), "dtype": "float32", "backend": "transformers"},
        lora={"r": 4, "target_modules": "all-linear"},
        parallel={"data": data},
        train={"device": "cpu", "micro_batch_tokens": 64, **train},
    )
    norms, entropies = [], []
    for seed in range(3):
        samples = make_samples(7, SIZES["vocab_size"], seed=seed)
        batch = model.pack(samples, np.linspace(0.05, 0.1, 7))
        entropies.append(model.forward_backward(batch, SurrogateLoss())["entropy"])
        norms.append(model.optim_step(5e-3)["grad_norm"])
    logprobs = np.concatenate(model.forward(batch))
    held = sum(
        getattr(parameter, "_local_tensor", parameter).numel() for parameter in model.network.causal.parameters()
    )
    result = {
        "norms": norms,
        "entropies": entropies,
        "logprobs": logprobs,
        "held": held,
        "adapter": {name: tensor.clone() for name, tensor in model.export_weights(adapter_only=True)},
        "base": {name: tensor.clone() for name, tensor in model.export_weights(adapter_only=False)},
        "merged": {name: tensor.clone() for name, tensor in model.export_merged()},
    }
    model.save_checkpoint(folder / f"checkpoint-{data}-{len(train)}")
    model.finish_checkpoint()
    destroy_groups()
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transformers")
    write_model(folder / "model", "gemma2")
    [result] = run_ranks(work, 1, folder, {}, 1)
    return folder, result


@pytest.mark.parametrize("train", [{}, {"shard_base": True}, {"shard_base": True, "recompute": "full"}], ids=str)
def test_two_ranks_train_what_one_does(alone: tuple[Path, dict[str, Any]], train: dict[str, Any]) -> None:
    folder, truth = alone
    first, second = run_ranks(work, 2, folder, train, 2)
    assert first["norms"] == second["norms"] == pytest.approx(truth["norms"], rel=1e-4)
    assert first["entropies"] == pytest.approx(truth["entropies"], rel=1e-4)
    for kind in ("adapter", "base", "merged"):
        for name, tensor in truth[kind].items():
            assert torch.equal(first[kind][name], second[kind][name])
            assert (first[kind][name] - tensor).abs().max() < (5e-4 if kind != "base" else 1e-9), (kind, name)
    assert np.abs(first["logprobs"] - truth["logprobs"]).max() < 2e-3
    if train:
        assert first["held"] < 0.8 * truth["held"], "each rank holds a part of the layers"
    else:
        assert first["held"] == truth["held"]
