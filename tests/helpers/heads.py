# SPDX-License-Identifier: Apache-2.0
"""Compare the kernel between the qkv projection and attention with torch's own operations.

Run as a program (`python -m tests.helpers.heads`), it uses float32 on the CPU and Triton's interpreter.
"""

import torch
import torch.nn.functional as F

from megarl.model.weights.fusion import HeadLayout, split_heads

EPS = 1e-6
LAYOUTS = [HeadLayout(8, 2, 128), HeadLayout(2, 7, 64), HeadLayout(3, 1, 80), HeadLayout(1, 40, 16)]
Weights = tuple[torch.Tensor, torch.Tensor] | None


def reference(
    fused: torch.Tensor, angles: torch.Tensor, weights: Weights, heads: HeadLayout, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Compute split, norms and RoPE as Hugging Face does."""
    query, key, value = split_heads(fused.to(dtype), heads)
    turned = []
    for states, weight in zip((query, key), weights or (None, None), strict=True):
        if weight is not None:
            states = F.rms_norm(states, weight.shape, weight.to(dtype), EPS)
        first, second = states.chunk(2, dim=-1)
        cos, sin = angles.double().cos().to(dtype), angles.double().sin().to(dtype)
        turned.append(states * cos + torch.cat((-second, first), dim=-1) * sin)
    return [*turned, value]


def run(compute, fused: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs and the gradient of the fused tensor, in float64."""
    leaf = fused.detach().requires_grad_()
    outs = compute(leaf)
    (by_fused,) = torch.autograd.grad(outs, leaf, [g.to(out.dtype) for g, out in zip(gradients, outs, strict=True)])
    return [tensor.detach().double() for tensor in (*outs, by_fused)]


def errors(heads: HeadLayout, norm: bool, dtype: torch.dtype, device: str) -> dict[str, tuple[float, float]]:
    """Return each result's relative error against float64: the kernel's, and that of torch in the same dtype."""
    from megarl.model.layers.kernels.heads import prepare_heads

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    tokens, dim = 19, heads.head_dim
    fused = draw(tokens, 1, heads.groups * (heads.queries + 2) * dim)
    weights = (1 + 0.3 * draw(dim), 1 + 0.3 * draw(dim)) if norm else None
    positions = torch.arange(tokens, device=device) * 53.0
    angles = torch.outer(positions, 10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim)).repeat(1, 2)
    angles = angles[:, None, None]
    gradients = [draw(tokens, 1, count, dim) for count in (heads.groups * heads.queries, heads.groups, heads.groups)]
    truth = run(lambda leaf: reference(leaf, angles, weights, heads, torch.float64), fused, gradients)
    theirs = run(lambda leaf: reference(leaf, angles, weights, heads, dtype), fused, gradients)
    ours = run(lambda leaf: prepare_heads(leaf, angles, weights, EPS, heads), fused, gradients)
    return {
        name: (float((mine - exact).norm() / exact.norm()), float((other - exact).norm() / exact.norm()))
        for name, mine, other, exact in zip(("query", "key", "value", "fused"), ours, theirs, truth, strict=True)
    }


if __name__ == "__main__":
    for heads, norm in zip(LAYOUTS[1:], (True, False, True), strict=True):
        measured = errors(heads, norm, torch.float32, "cpu")
        assert all(error <= 3e-7 for error, _ in measured.values()), (heads, norm, measured)
