# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for an H100 or H200 on a host without a GPU: `python -m tests.helpers.compiled_kernels WHAT`.

Triton's interpreter takes more of Python than its compiler does, so kernels that it runs may not compile. Here the
functions that launch them get tensors of the CPU, and each launch compiles and does not run. Results are arbitrary.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.wire import Place, Places
from megarl.triton_support import quick_launch

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
    quick_launch.MOST = 0  # every launch is Triton's
    names: list[str] = []
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        assert kernel.asm["cubin"], self.fn.__name__
        names.append(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
        return kernel

    JITFunction.run = compiled
    return names


def compile_writes() -> None:
    """Compile what writes base weights into an engine, or compares them: whole tensors, and columns of one."""
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies
    from megarl.checkpoint_engine.receiver.writers.gpu import GpuWrites

    dtype, payload = torch.bfloat16, torch.zeros(4096, dtype=torch.uint8)
    places = Places(
        [Place("whole", "bfloat16", (32, 16), 0, 0, 1024), Place("cut", "bfloat16", (32, 16), 0, 1024, 1024)]
    )
    whole, columns = Source(0, dtype, 0, (32, 16), (16, 1)), Source(0, dtype, 512, (32, 8), (16, 1))
    for held in (False, True):
        writes = [
            [Write(place.name, torch.zeros(source.shape, dtype=dtype), source, 1.0, held)]
            for place, source in zip(places, (whole, columns), strict=True)
        ]
        copies = Copies(places, writes)
        copies.run(payload)
        GpuWrites(copies.others).run(payload)


def compile_layers() -> None:
    """Compile the kernels of layers, updates and losses."""
    from megarl.loss.kernels.softmax import softmax_slope_, softmax_sums
    from tests.helpers import grouped_kernels, heads, row_kernels, update_kernels

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
    for grouped in grouped_kernels.SHAPES.values():
        grouped_kernels.errors(grouped_kernels.COUNTS["even"], grouped, torch.bfloat16, "cpu")
    logits, labels = torch.zeros(3, 5000, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    numbers = torch.zeros(3)
    softmax_sums(logits, labels, 0.7)
    softmax_slope_(logits, labels, numbers, numbers, 0.7, numbers, numbers)


def main(what: str) -> None:
    """Compile the kernels of ``layers`` or ``writes``, and print their names."""
    names = compile_launches()
    {"layers": compile_layers, "writes": compile_writes}[what]()
    print("\n".join(sorted(set(names))))


if __name__ == "__main__":
    main(*sys.argv[1:])
