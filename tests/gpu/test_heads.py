"""The kernel between the qkv projection and attention, against the same in float64 by torch's own operations."""

import pytest
import torch
import torch.nn.functional as F

from megarl.model.fusion import HeadLayout, split_heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

EPS, DEVICE = 1e-6, "cuda"


def reference(fused, angles, weights, heads, dtype):
    """Split, norms and RoPE as Hugging Face writes them."""
    query, key, value = split_heads(fused.to(dtype), heads)
    turned = []
    for states, weight in zip((query, key), weights or (None, None), strict=True):
        if weight is not None:
            states = F.rms_norm(states, weight.shape, weight.to(dtype), EPS)
        first, second = states.chunk(2, dim=-1)
        cos, sin = angles.double().cos().to(dtype), angles.double().sin().to(dtype)
        turned.append(states * cos + torch.cat((-second, first), dim=-1) * sin)
    return (*turned, value)


def run(compute, fused, gradients):
    leaf = fused.detach().requires_grad_()
    outs = compute(leaf)
    (by_fused,) = torch.autograd.grad(outs, leaf, [g.to(out.dtype) for g, out in zip(gradients, outs, strict=True)])
    return [tensor.detach().double() for tensor in (*outs, by_fused)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    "heads", [HeadLayout(8, 2, 128), HeadLayout(2, 7, 64), HeadLayout(3, 1, 80), HeadLayout(1, 40, 16)], ids=str
)
def test_heads_are_prepared_as_accurately_as_bf16_allows(heads, norm):
    from megarl.model.kernels.heads import prepare_heads

    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator).to(torch.bfloat16)

    tokens, dim = 77, heads.head_dim
    fused = draw(tokens, 1, heads.groups * (heads.queries + 2) * dim)
    weights = (1 + 0.3 * draw(dim), 1 + 0.3 * draw(dim)) if norm else None
    positions = torch.arange(tokens, device=DEVICE) * 53.0
    angles = torch.outer(positions, 10000.0 ** -(torch.arange(0, dim, 2, device=DEVICE) / dim)).repeat(1, 2)
    angles = angles[:, None, None]
    gradients = [draw(tokens, 1, count, dim) for count in (heads.groups * heads.queries, heads.groups, heads.groups)]

    truth = run(lambda leaf: reference(leaf, angles, weights, heads, torch.float64), fused, gradients)
    theirs = run(lambda leaf: reference(leaf, angles, weights, heads, torch.bfloat16), fused, gradients)
    ours = run(lambda leaf: prepare_heads(leaf, angles, weights, EPS, heads), fused, gradients)
    for name, mine, other, exact in zip(("query", "key", "value", "fused"), ours, theirs, truth, strict=True):
        error, allowed = (mine - exact).norm() / exact.norm(), (other - exact).norm() / exact.norm()
        print(f"{name}: {error:.2e}, as torch operations in bf16 {allowed:.2e}")
        # One rounding of each result: at most 2^-9 relative.
        assert error <= 2.0**-9 and error <= allowed + 1e-7
