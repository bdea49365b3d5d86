# SPDX-License-Identifier: Apache-2.0
"""Compare compiled layers that call megarl's kernels with uncompiled ones, and check the operations by torch's rules.

Run as a program (`python -m tests.helpers.traced_kernels`), it uses float32 on the CPU, Triton's interpreter, and a
back end of torch.compile that makes no kernels of its own.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.library import opcheck

from megarl.model.layers import pointwise
from megarl.model.layers.attention import self_attention
from megarl.model.step import compiled
from megarl.verify.inputs.tiny_model import write_random
from tests.helpers.bitwise_layers import CONFIGS, results

OPERATIONS = ("prepare_heads", "prepare_heads_backward", "swiglu", "swiglu_backward")


def count_calls() -> dict[str, int]:
    """Count the calls of each operation from here on."""
    from megarl.model.layers.kernels import heads, swiglu

    calls = dict.fromkeys(OPERATIONS, 0)
    places = zip((heads, heads, swiglu, swiglu), ("result_of", "gradient_of") * 2, strict=True)
    for name, (module, function) in zip(OPERATIONS, places, strict=True):
        setattr(module, function, _counted(calls, name, getattr(module, function)))
    return calls


def _counted(calls: dict[str, int], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        calls[name] += 1
        return kernel(*given)

    return call


def check_operations() -> None:
    """Check schema, fake, autograd and traces with dynamic shapes."""
    from megarl.model.layers.kernels import ops

    fused, angles = torch.randn(5, 1, 2 * 5 * 16), torch.randn(5, 1, 1, 8).repeat(1, 1, 1, 2)
    for weights in ([torch.randn(16), torch.randn(16)], []):
        opcheck(ops.prepare_heads, (fused.requires_grad_(), angles, weights, 1e-6, [2, 3, 16]))
    opcheck(ops.swiglu, (torch.randn(7, 1, 96).requires_grad_(),))


def main() -> None:
    torch.set_num_threads(1)
    compiled.BACKEND = "aot_eager"
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_random(config, Path(scratch) / "model")
            plain, plain_gradients, _ = results(folder, "fast")
            # As on a GPU in 16 bits.
            pointwise.has_kernels = self_attention.has_kernels = lambda tensor: pointwise.traced()
            calls = count_calls()
            torch._dynamo.reset()
            ours, gradients, _ = results(folder, "fast", compile=True)
            pointwise.has_kernels = self_attention.has_kernels = lambda tensor: False
        assert all(calls.values()), calls
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        for name, gradient in gradients.items():
            error = (gradient - plain_gradients[name]).norm() / plain_gradients[name].norm()
            assert error < 1e-3, (name, float(error))


if __name__ == "__main__":
    check_operations()
    main()
