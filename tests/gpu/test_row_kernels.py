"""The SwiGLU and RMSNorm kernels round once; a linear with LoRA in one product is as accurate as in several."""

import pytest
import torch

from megarl.lora.products import Layout, add_wide, project_through
from megarl.lora.room import Room, one_product
from megarl.model.fusion import HeadLayout
from tests.helpers.row_kernels import SHAPES, norm_errors, swiglu_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
HEADS = HeadLayout(groups=2, queries=3, head_dim=64)


@pytest.mark.parametrize("measure", [swiglu_errors, norm_errors])
@pytest.mark.parametrize(("width", "spare"), SHAPES)
def test_a_kernel_is_as_accurate_as_bf16_allows(measure, width, spare):
    for name, (error, allowed) in measure(width, spare, torch.bfloat16, "cuda").items():
        assert error <= 2.0**-9 and error <= allowed + 1e-7, (name, error, allowed)


@pytest.mark.parametrize("scalings", [(2.0, 2.0, 2.0), (2.0, 0.3, 1.0)])
def test_one_product_is_as_accurate_as_several(scalings):
    generator = torch.Generator("cuda").manual_seed(0)
    layout = Layout((0, 1, 2), (16, 8, 16), scalings, "qkv", HEADS)
    rows, inputs = (384, 128, 128), 256

    def draw(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    hidden, weight, slope = draw(300, 1, inputs), draw(640, inputs), draw(300, 1, 640)
    factors = [draw(40, inputs) / 16, *(draw(count, rank) for count, rank in zip(rows, layout.ranks, strict=True))]

    def run(compute, dtype):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, *factors)]
        out = compute(*leaves)
        return [tensor.detach().double() for tensor in (out, *torch.autograd.grad(out, leaves, slope.to(dtype)))]

    def several(x, a, *b):
        x, low = project_through(x, a)
        return add_wide(x @ weight.to(x.dtype).t(), low, b, layout)

    def one(x, a, *b):
        return one_product(x, a, b, layout, Room.beside(torch.nn.Parameter(weight.clone()), layout), spare=False)

    truth = run(several, torch.float64)
    for mine, other, exact in zip(run(one, torch.bfloat16), run(several, torch.bfloat16), truth, strict=True):
        assert (mine - exact).norm() <= 1.05 * (other - exact).norm()
