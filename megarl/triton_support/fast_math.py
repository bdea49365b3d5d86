# SPDX-License-Identifier: Apache-2.0
"""Elementary functions for Triton kernels in few instructions, of float32.

Triton's own take several times as many: for numbers below 1e-38, which are 0 here, for the last bits, and for angles
beyond 1e5. In a kernel that reads each number once they are what takes the time. Errors, by the PTX manual: 2 units in
the last place for powers, 2^-20 for cosine and sine.
"""

import math
import os
import struct

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
# A turn as a sum of two float32 numbers, so that an angle's whole turns are taken away without an error.
_COARSE = struct.unpack("f", struct.pack("f", 2 * math.pi))[0]
TURN: tl.constexpr = tl.constexpr(_COARSE)
REST_OF_TURN: tl.constexpr = tl.constexpr(2 * math.pi - _COARSE)
TURNS: tl.constexpr = tl.constexpr(0.5 / math.pi)

if os.environ.get("TRITON_INTERPRET") == "1":  # which has no assembler

    @triton.jit
    def exp(values):
        """Return e to the power of ``values``."""
        return tl.exp(values)

    @triton.jit
    def sigmoid(values):
        """Return ``1 / (1 + exp(-values))``."""
        return tl.sigmoid(values)

    @triton.jit
    def cos_sin(angles):
        """Return cosine and sine of ``angles``, radians of up to 1e6."""
        return tl.cos(angles), tl.sin(angles)

else:

    @triton.jit
    def exp(values):
        """Return e to the power of ``values``."""
        return _power_of_two(values * LOG2_E)

    @triton.jit
    def sigmoid(values):
        """Return ``1 / (1 + exp(-values))``."""
        divisor = 1.0 + _power_of_two(values * -LOG2_E)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1)

    @triton.jit
    def cos_sin(angles):
        """Return cosine and sine of ``angles``, radians of up to 1e6."""
        whole = -tl.floor(angles * TURNS + 0.5)
        left = tl.fma(whole, REST_OF_TURN, tl.fma(whole, TURN, angles))
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [left], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [left], tl.float32, True, 1)
        return cos, sin

    @triton.jit
    def _power_of_two(values):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], tl.float32, True, 1)
