# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of SwiGLU, weighted SwiGLU, sums of rows and RMSNorm with torch's own operations.

Gradients and sums are also those of rows that are not adjacent.
Run as a program (`python -m tests.helpers.row_kernels`), it uses float32 on the CPU and Triton's interpreter.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

EPS, TOKENS = 1e-6, 75
# Width of the result, and of the gap after each row of its gradient.
SHAPES = [(384, 0), (200, 8), (130, 48), (1024, 16)]
Errors = dict[str, tuple[float, float]]


def swiglu_errors(width: int, gap: int, dtype: torch.dtype, device: str) -> Errors:
    """Return each result's relative error against float64: the kernel's, and that of torch in the same dtype."""
    from megarl.model.layers.kernels.swiglu import swiglu

    def theirs(fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _errors(2 * width, width, gap, dtype, device, swiglu, theirs)


def weighted_errors(width: int, gap: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the errors of SwiGLU times a weight of each token; the weights are a further input, in float32."""
    from megarl.model.layers.kernels.weighted_swiglu import weighted_swiglu

    weights = torch.linspace(0.1, 1.7, TOKENS, device=device).requires_grad_()

    def ours(fused: torch.Tensor) -> torch.Tensor:
        return weighted_swiglu(fused.squeeze(1), weights).unsqueeze(1)

    def theirs(fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.chunk(2, dim=-1)
        scales = weights.to(torch.promote_types(fused.dtype, weights.dtype)).view(-1, 1, 1)
        return (F.silu(gate) * up * scales).to(fused.dtype)

    return _errors(2 * width, width, gap, dtype, device, ours, theirs, weights)


def sum_errors(width: int, gap: int, dtype: torch.dtype, device: str) -> Errors:
    """Return the error of sums of three rows for each token, of which some are the same."""
    from megarl.model.layers.kernels.row_sums import sum_rows

    generator = torch.Generator(device).manual_seed(1)
    rows = torch.randn(2 * TOKENS, width + gap, device=device, generator=generator).to(dtype)[:, :width]
    places = torch.randint(2 * TOKENS, (TOKENS, 3), device=device, generator=generator)
    exact = rows.double()[places].sum(dim=1)
    return {"sum": (_error(sum_rows(rows, places), exact), _error(rows[places].sum(dim=1), exact))}


def norm_errors(width: int, gap: int, dtype: torch.dtype, device: str) -> Errors:
    """Return RMSNorm's errors, as ``swiglu_errors`` does SwiGLU's."""
    from megarl.model.layers.kernels.norm import rms_norm

    weight = torch.linspace(-0.5, 2.0, width, device=device).to(dtype)

    def theirs(hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (width,), weight.to(hidden.dtype), EPS)

    return _errors(width, width, gap, dtype, device, lambda hidden: rms_norm(hidden, weight, EPS), theirs)


def _errors(
    inputs: int,
    outputs: int,
    gap: int,
    dtype: torch.dtype,
    device: str,
    ours: Callable[[torch.Tensor], torch.Tensor],
    theirs: Callable[[torch.Tensor], torch.Tensor],
    *others: torch.Tensor,
) -> Errors:
    generator = torch.Generator(device).manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(TOKENS, 1, width, device=device, generator=generator).to(dtype)

    given, slope = draw(inputs), draw(outputs + gap)[..., :outputs]

    def run(compute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = given.detach().to(dtype).requires_grad_()
        out = compute(leaf)
        along = slope.to(dtype) if dtype is not given.dtype else slope
        return [result.detach().double() for result in (out, *torch.autograd.grad(out, (leaf, *others), along))]

    results = zip(run(ours, dtype), run(theirs, dtype), run(theirs, torch.float64), strict=True)
    names = ("output", "gradient", *(f"gradient of input {number}" for number in range(2, 2 + len(others))))
    return {
        name: (_error(mine, exact), _error(other, exact))
        for name, (mine, other, exact) in zip(names, results, strict=True)
    }


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


if __name__ == "__main__":
    for width, gap in SHAPES[:3]:
        for measure in (swiglu_errors, weighted_errors, sum_errors, norm_errors):
            measured = measure(width, gap, torch.float32, "cpu")
            assert all(error <= 5e-7 for error, _ in measured.values()), (measure.__name__, width, gap, measured)
