# SPDX-License-Identifier: Apache-2.0
"""Compare compiled layers that call megarl's kernels with uncompiled ones, and check the operations by torch's rules.

Run as a program (`python -m tests.helpers.traced_kernels`), it uses float32 on the CPU, Triton's interpreter, and a
back end of torch.compile that makes no kernels of its own.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.library import opcheck

from megarl.lora.layers import parallel_linear, products, traced_linear
from megarl.model.layers import pointwise, transformer_layer
from megarl.model.layers.attention import self_attention
from megarl.model.layers.kernels import heads, narrow_gradients, swiglu, through_gradients
from megarl.model.layers.traced import before, behind, ops
from megarl.model.step import compiled
from megarl.verify.inputs.tiny_model import write_random
from tests.helpers.bitwise_configs import SMALL, configs
from tests.helpers.bitwise_layers import results
from tests.helpers.counting import count_calls
from tests.helpers.update_kernels import require_pieces

# What a kernel computes -> the module and the name of the function that launches it; where layers are computed by
# operations of single parts, and by one before attention and one behind it.
PARTS = {
    "prepare_heads": (heads, "result_of"),
    "prepare_heads_backward": (heads, "gradient_of"),
    "swiglu": (swiglu, "result_of"),
    "swiglu_backward": (swiglu, "gradient_of"),
    "gradients of A": (through_gradients, "through_gradients"),
    "gradients of B": (narrow_gradients, "narrow_gradients"),
}
WHOLE = {
    "before": (before.AdaptedHeads, "forward"),
    "before_backward": (before.AdaptedHeads, "backward"),
    "behind": (behind.AdaptedSwiGLU, "forward"),
    "behind_backward": (behind.AdaptedSwiGLU, "backward"),
    "the first layer's input": (before, "through_gradients"),
}
# Functions that say whether there is a GPU's kernel for a tensor.
SWITCHES = (
    (pointwise, "has_kernels"),
    (self_attention, "has_kernels"),
    (traced_linear, "has_kernels"),
    (products, "wants_kernels"),
    (parallel_linear, "wants_kernels"),
)


def check_operations() -> None:
    """Check schema, fake, autograd and traces with dynamic shapes."""
    fused, angles = torch.randn(5, 1, 2 * 5 * 16), torch.randn(5, 1, 1, 8).repeat(1, 1, 1, 2)
    for weights in ([torch.randn(16), torch.randn(16)], []):
        opcheck(ops.prepare_heads.overload, (fused.requires_grad_(), angles, weights, 1e-6, [2, 3, 16]))
    opcheck(ops.swiglu.overload, (torch.randn(7, 1, 96).requires_grad_(),))
    check_whole()


def check_whole() -> None:
    """Check the operations before and behind attention in the same way; without room, which they overwrite."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).requires_grad_()

    angles, heads_of = torch.randn(5, 1, 1, 16).repeat(1, 1, 1, 2), [2, 1, 32]
    weight, norm, matrices = torch.randn(192, 48), torch.rand(48), [draw(64, 4), draw(64, 4)]
    for hidden in (draw(5, 1, 48), torch.randn(5, 1, 48)):
        for norms in ([norm], [norm, torch.rand(32), torch.rand(32)]):
            matrices_a = [draw(4, 48), draw(4, 48)]
            given = hidden, angles, weight, matrices_a, matrices, None, norms, [0, -1, 4], [2.0, 0.0, 0.5]
            opcheck(before.before_attention.overload, (*given, [1e-6, 1e-6], heads_of))
    weights = [torch.randn(48, 64), torch.randn(192, 48), torch.randn(48, 96)]
    matrices_a = [draw(4, 64), draw(4, 48), draw(4, 48), draw(4, 96)]
    matrices = [draw(48, 4), draw(96, 4), draw(96, 4), draw(48, 4)]
    places = [1, 2, 1], [0, 0, 4, 0], [2.0, 2.0, 0.5, 2.0]
    out, residual = draw(5, 1, 64), draw(5, 1, 48)
    given = out, residual, norm, weights, matrices_a, matrices, None, None, *places, 1e-6
    opcheck(behind.behind_attention.overload, given)


def compare(counted: dict[str, tuple[Any, str]], rank: int, layers: int, *, direct: bool = False) -> None:
    """Compare logprobs and gradients with those of uncompiled layers without kernels.

    ``direct``: the operations are called directly, so that nothing is compiled.
    """
    for config in configs(SMALL | {"vocab_size": 160, "num_hidden_layers": layers}).values():
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_random(config, Path(scratch) / "model")
            plain, plain_gradients, _ = results(folder, "fast", rank)
            # As on a GPU in 16 bits.
            pointwise.has_kernels = self_attention.has_kernels = lambda tensor: direct or pointwise.traced()
            traced_linear.has_kernels = products.wants_kernels = parallel_linear.wants_kernels = lambda tensor: True
            calls = count_calls(counted)
            torch._dynamo.reset()
            count = compiled.CompilationCount()
            ours, gradients, _ = results(folder, "fast", rank, compile=True)
            assert (count.read() == 0) is direct
            for module, name in SWITCHES:
                setattr(module, name, lambda tensor: False)
        assert all(calls.values()), calls
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        for name, gradient in gradients.items():
            error = (gradient - plain_gradients[name]).norm() / plain_gradients[name].norm()
            assert error < 1e-3, (name, float(error))


def main() -> None:
    torch.set_num_threads(1)
    compiled.BACKEND = "aot_eager"
    require_pieces()
    # There is room behind the weights for such ranks. The first layer's input has no gradient.
    compare(WHOLE, rank=8, layers=2)
    compare(WHOLE, rank=8, layers=2, direct=True)
    transformer_layer.before = transformer_layer.behind = lambda *given: None
    compare(PARTS, rank=4, layers=1)


if __name__ == "__main__":
    check_operations()
    main()
