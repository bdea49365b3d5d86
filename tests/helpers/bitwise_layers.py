# SPDX-License-Identifier: Apache-2.0
"""Compare a bitwise model with the fast one, and its logprobs alone with those in a pack.

Run as a program (`python -m tests.helpers.bitwise_layers`), it uses float32 on the CPU and Triton's interpreter.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megarl
from megarl.verify.inputs.tiny_model import write_random
from tests.helpers.bitwise_configs import SMALL, configs
from tests.helpers.interpreter import sum_in_order

CONFIGS = list(configs(SMALL | {"vocab_size": 160}).values())


def samples() -> list[megarl.Sample]:
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 160, length) for length in (24, 9, 13)]
    return [megarl.Sample(t, np.arange(len(t)) >= 4, float(i - 1)) for i, t in enumerate(tokens)]


def results(
    folder: Path, numerics: str, rank: int = 4, **train: Any
) -> tuple[list[np.ndarray], dict[str, torch.Tensor], Any]:
    """Return logprobs and gradients after one step, which makes B differ from zero."""
    model = megarl.build_model(
        {"path": str(folder), "dtype": "float32", "numerics": numerics},
        lora={"r": rank},
        train={"device": "cpu"} | train,
    )
    weights = megarl.sequence_weights(np.array([20, 5, 9]), "token_mean", max_response_tokens=100)
    loss = megarl.build_loss({"name": "grpo", "importance_cap": None})
    for _ in range(2):
        batch = model.pack(samples(), weights)
        logprobs = model.forward(batch)
        model.forward_backward(batch, loss)
        gradients = {name: gradient.clone() for name, gradient in model.gradients().items()}
        model.optim_step(1e-2)
    return logprobs, gradients, model


def main() -> None:
    torch.set_num_threads(1)
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_random(config, Path(scratch) / "model")
            fast, fast_gradients, _ = results(folder, "fast")
            ours, gradients, model = results(folder, "bitwise")
            for one, other in zip(ours, fast, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)
            for name, gradient in gradients.items():
                error = (gradient - fast_gradients[name]).norm() / fast_gradients[name].norm()
                assert error < 1e-3, (name, float(error))
            packed = model.forward(model.pack(samples()))
            (alone,) = model.forward(model.pack(samples()[2:]))
            assert np.array_equal(alone, packed[2])


if __name__ == "__main__":
    sum_in_order()
    main()
