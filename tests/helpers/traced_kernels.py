# SPDX-License-Identifier: Apache-2.0
"""Compare compiled layers that call megarl's kernels with uncompiled ones, and check the operations by torch's rules.

Run as a program (`python -m tests.helpers.traced_kernels`), it uses float32 on the CPU, Triton's interpreter, and a
back end of torch.compile that makes no kernels of its own.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.library import opcheck

from megarl.lora.layers import products, traced_linear
from megarl.model.layers import pointwise
from megarl.model.layers.attention import self_attention
from megarl.model.layers.kernels import heads, narrow_gradients, swiglu, through_gradients
from megarl.model.step import compiled
from megarl.verify.inputs.tiny_model import write_random
from tests.helpers.bitwise_layers import CONFIGS, results
from tests.helpers.counting import count_calls

# What a kernel computes -> the module and the name of the function that launches it.
OPERATIONS = {
    "prepare_heads": (heads, "result_of"),
    "prepare_heads_backward": (heads, "gradient_of"),
    "swiglu": (swiglu, "result_of"),
    "swiglu_backward": (swiglu, "gradient_of"),
    "gradients of A": (through_gradients, "through_gradients"),
    "gradients of B": (narrow_gradients, "narrow_gradients"),
}
# Functions that say whether there is a GPU's kernel for a tensor.
SWITCHES = (
    (pointwise, "has_kernels"),
    (self_attention, "has_kernels"),
    (traced_linear, "has_kernels"),
    (products, "wants_kernels"),
)


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
            traced_linear.has_kernels = products.wants_kernels = lambda tensor: True
            calls = count_calls(OPERATIONS)
            torch._dynamo.reset()
            ours, gradients, _ = results(folder, "fast", compile=True)
            for module, name in SWITCHES:
                setattr(module, name, lambda tensor: False)
        assert all(calls.values()), calls
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        for name, gradient in gradients.items():
            error = (gradient - plain_gradients[name]).norm() / plain_gradients[name].norm()
            assert error < 1e-3, (name, float(error))


if __name__ == "__main__":
    check_operations()
    main()
