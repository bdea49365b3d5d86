# SPDX-License-Identifier: Apache-2.0
"""Check the errors that `fast_math` claims."""

import pytest
import torch
import triton
import triton.language as tl

from megarl.triton_support.fast_math import cos_sin, exp, sigmoid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
COUNT = 2**20


@triton.jit
def _all(values, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place)
    cos, sin = cos_sin(value)
    tl.store(out + place, exp(value))
    tl.store(out + COUNT + place, sigmoid(value))
    tl.store(out + 2 * COUNT + place, cos)
    tl.store(out + 3 * COUNT + place, sin)


def computed(values: torch.Tensor) -> torch.Tensor:
    """Return exponential, logistic function, cosine and sine: float64 ``[4, COUNT]``."""
    out = values.new_empty(4, COUNT)
    _all[(COUNT // 1024,)](values, out, COUNT=COUNT, BLOCK=1024)
    return out.double()


def test_powers_are_those_of_float64():
    values = torch.linspace(-80.0, 80.0, COUNT, device="cuda")
    ours, exact = computed(values), values.double()
    # The product with log2(e) is rounded, which counts more the larger the power is.
    allowed = 2.0**-22 * (1.0 + exact.abs())
    assert ((ours[0] / exact.exp() - 1.0).abs() <= allowed).all()
    assert ((ours[1] - exact.sigmoid()).abs() <= allowed * exact.sigmoid()).all()


@pytest.mark.parametrize("largest", [4.0, 1e3, 1e6])
def test_cosine_and_sine_are_those_of_float64(largest):
    angles = torch.linspace(0.0, largest, COUNT, device="cuda")
    ours, exact = computed(angles), angles.double()
    assert ((ours[2] - exact.cos()).abs() <= 2.0**-20).all()
    assert ((ours[3] - exact.sin()).abs() <= 2.0**-20).all()


def test_what_underflows_or_overflows_is_zero_or_infinite():
    ends = torch.tensor([-1e4, 1e4], device="cuda").repeat(COUNT // 2)
    ours = computed(ends)[:2, :2].cpu()
    assert ours.tolist() == [[0.0, float("inf")], [0.0, 1.0]]
