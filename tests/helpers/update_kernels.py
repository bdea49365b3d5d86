# SPDX-License-Identifier: Apache-2.0
"""Compare models with the kernels that add an adapter's update, and without them.

Run as a program (`python -m tests.helpers.update_kernels`), it uses float32 on the CPU and Triton's interpreter, and
measures each kernel (``update_errors``) first.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.helpers.counting import count_calls
from tests.helpers.update_errors import MEASURES, SHAPES


def count_updates() -> dict[str, int]:
    """Count the calls of the functions that add updates from here on."""
    from megarl.model.layers import updates
    from megarl.model.layers.kernels import (
        adapted_heads,
        adapted_norm,
        adapted_swiglu,
        norm,
        residual,
        through_gradients,
    )

    places = {
        adapted_heads: "prepare_adapted_heads",
        adapted_swiglu: "adapted_swiglu",
        norm: "rms_norm_beside",
        residual: "add_adapted",
        through_gradients: "through_gradients",
        updates: "in_one_piece",
    }
    found = {name: (module, name) for module, name in places.items()}
    return count_calls(found | {name: (adapted_norm, name) for name in ("rms_norm_projected", "add_and_norm")})


def require_pieces() -> None:
    """Let a linear's backward pass fail from here on if the gradients that it gets do not lie in one piece."""
    from megarl.model.layers import updates

    look = updates.in_one_piece

    def found(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        whole = look(wide, narrow)
        assert whole is not None, (wide.shape, wide.stride(), narrow.shape, narrow.stride())
        return whole

    updates.in_one_piece = found


def with_kernels(on: bool) -> None:
    """Use the kernels, or do not, whatever the tensors."""
    from megarl.lora.layers import parallel_linear, products
    from megarl.model.layers import gpt, mlp, pointwise
    from megarl.model.layers.attention import self_attention

    for module in (pointwise, gpt, mlp.pointwise, products, parallel_linear, self_attention):
        for name in {"has_kernels", "wants_kernels"} & set(vars(module)):
            setattr(module, name, lambda tensor: on)


def compare_models() -> None:
    """Compare logprobs and gradients of small models with those without kernels."""
    from megarl.verify.inputs.tiny_model import write_random
    from tests.helpers.bitwise_configs import SMALL, configs
    from tests.helpers.bitwise_layers import results

    counts = count_updates()
    require_pieces()
    # The first layer's norm of hidden states has no gradient.
    for config in configs(SMALL | {"vocab_size": 160, "num_hidden_layers": 2}).values():
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_random(config, Path(scratch) / "model")
            with_kernels(False)
            plain, plain_gradients, _ = results(folder, "fast")
            assert not any(counts.values()), counts
            with_kernels(True)
            ours, gradients, _ = results(folder, "fast")
            assert all(counts.values()), counts
            counts.update(dict.fromkeys(counts, 0))
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        for name, gradient in gradients.items():
            error = (gradient - plain_gradients[name]).norm() / plain_gradients[name].norm()
            assert error < 1e-3, (name, float(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with_kernels(True)
    for shape in SHAPES[:4]:
        for measure in MEASURES:
            measured = measure(*shape, torch.float32, "cpu")
            assert all(error <= 1e-6 for error, _ in measured.values()), (measure.__name__, shape, measured)
    compare_models()
