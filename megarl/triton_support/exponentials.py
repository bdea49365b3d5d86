# SPDX-License-Identifier: Apache-2.0
"""Exponentials for Triton kernels in few instructions.

Triton's own take four times as many, most of them for numbers below 1e-38, which are 0 here. In a kernel that reads
each number once they are what takes the time. Results are within 2 units in the last place of float32 for the base-2
exponential, as those of Triton are.
"""

import os

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

if os.environ.get("TRITON_INTERPRET") == "1":  # which has no assembler

    @triton.jit
    def exp(values):
        """Return e to the power of float32 ``values``."""
        return tl.exp(values)

    @triton.jit
    def sigmoid(values):
        """Return ``1 / (1 + exp(-values))``, float32."""
        return tl.sigmoid(values)

else:

    @triton.jit
    def exp(values):
        """Return e to the power of float32 ``values``."""
        return _power_of_two(values * LOG2_E)

    @triton.jit
    def sigmoid(values):
        """Return ``1 / (1 + exp(-values))``, float32."""
        divisor = 1.0 + _power_of_two(values * -LOG2_E)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1)

    @triton.jit
    def _power_of_two(values):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], tl.float32, True, 1)
