"""The SwiGLU and RMSNorm kernels beside torch's own operations, on rows that lie apart or not.

As a program (`python -m tests.helpers.row_kernels`): in float32 on the CPU, by Triton's interpreter.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

EPS, TOKENS = 1e-6, 75
# Width of the result, and columns to spare behind each row of it.
SHAPES = [(384, 0), (200, 8), (130, 48), (1024, 16)]
Errors = dict[str, tuple[float, float]]


def swiglu_errors(width: int, spare: int, dtype: torch.dtype, device: str) -> Errors:
    """Result -> relative error of the kernel and of torch's operations in the same dtype, both against float64."""
    from megarl.model.kernels.swiglu import swiglu

    def theirs(fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _errors(2 * width, width, spare, dtype, device, lambda fused: swiglu(fused, spare), theirs)


def norm_errors(width: int, spare: int, dtype: torch.dtype, device: str) -> Errors:
    """As ``swiglu_errors``."""
    from megarl.model.kernels.norm import rms_norm

    weight = torch.linspace(-0.5, 2.0, width, device=device).to(dtype)

    def theirs(hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (width,), weight.to(hidden.dtype), EPS)

    return _errors(width, width, spare, dtype, device, lambda hidden: rms_norm(hidden, weight, EPS, spare), theirs)


def _errors(
    inputs: int,
    outputs: int,
    spare: int,
    dtype: torch.dtype,
    device: str,
    ours: Callable[[torch.Tensor], torch.Tensor],
    theirs: Callable[[torch.Tensor], torch.Tensor],
) -> Errors:
    generator = torch.Generator(device).manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(TOKENS, 1, width, device=device, generator=generator).to(dtype)

    given, slope = draw(inputs), draw(outputs + spare)[..., :outputs]

    def run(compute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = given.detach().to(dtype).requires_grad_()
        out = compute(leaf)
        (gradient,) = torch.autograd.grad(out, leaf, slope.to(dtype) if dtype is not given.dtype else slope)
        return [out.detach().double(), gradient.double()]

    assert ours(given).stride(0) == outputs + spare
    found = zip(run(ours, dtype), run(theirs, dtype), run(theirs, torch.float64), strict=True)
    return {
        name: (float((mine - exact).norm() / exact.norm()), float((other - exact).norm() / exact.norm()))
        for name, (mine, other, exact) in zip(("output", "gradient"), found, strict=True)
    }


if __name__ == "__main__":
    for width, spare in SHAPES[:3]:
        for measure in (swiglu_errors, norm_errors):
            found = measure(width, spare, torch.float32, "cpu")
            assert all(error <= 5e-7 for error, _ in found.values()), (measure.__name__, width, spare, found)
