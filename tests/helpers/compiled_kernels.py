# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for an H100 or H200 on a host without a GPU: `python -m tests.helpers.compiled_kernels`.

Triton's interpreter takes more of Python than its compiler does, so kernels that it runs may not compile. Here the
functions that launch them get tensors of the CPU, and each launch compiles and does not run. Results are arbitrary.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
# Shapes of ``update_kernels``: with both adapters, of a low rank too, and with the second one alone.
SHAPES = [(384, 32, 16), (384, 16, 16), (130, 0, 40)]


class _NoGpu:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_launches() -> list[str]:
    """Make launches compile only, from here on; return a list that gets the names of what was compiled."""
    driver.set_active(_NoGpu())
    names: list[str] = []
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        assert kernel.asm["cubin"], self.fn.__name__
        names.append(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
        return kernel

    JITFunction.run = compiled
    return names


def main() -> None:
    """Compile the kernels of layers, updates and losses."""
    from megarl.loss.kernels.softmax import softmax_slope_, softmax_sums
    from tests.helpers import heads, row_kernels, update_kernels

    names = compile_launches()
    update_kernels.with_kernels(True)
    for measure in update_kernels.MEASURES:
        for shape in SHAPES:
            measure(*shape, torch.bfloat16, "cpu")
    for measure in (
        row_kernels.swiglu_errors,
        row_kernels.weighted_errors,
        row_kernels.sum_errors,
        row_kernels.norm_errors,
    ):
        measure(384, 0, torch.bfloat16, "cpu")
    heads.errors(heads.LAYOUTS[0], True, torch.bfloat16, "cpu")
    logits, labels = torch.zeros(3, 5000, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    numbers = torch.zeros(3)
    softmax_sums(logits, labels, 0.7)
    softmax_slope_(logits, labels, numbers, numbers, 0.7, numbers, numbers)
    print("\n".join(sorted(set(names))))


if __name__ == "__main__":
    main()
