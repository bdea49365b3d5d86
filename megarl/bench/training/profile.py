# SPDX-License-Identifier: Apache-2.0
"""Profile a step on the device: a table of operations in a file, and their time by kind of work."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

# Kind of work -> pattern of kernel names (on a CPU: of operations). The first match counts.
KINDS = {
    "attention": r"^_(attend|by_query|by_key)$|sdpa|flash|fmha|fused_attn|dot_do_o|convert_dq|qkv_tma",
    "communication": r"nccl|c10d",
    "matrix products": r"^_(matmul|shrink|expand)$|nvjet|gemm|cutlass|splitK|xmma|aten::(add|b|)mm",
    "softmax of logits": r"^_(sums|slope|divide)$|log_softmax",
    "norms, RoPE, activations": r"rms_?norm|layer_norm|rope|act_kernel|^_(heads|swiglu|norm|rotate)(_|$)|triton_|silu",
    "optimizer": r"multi_tensor|adam",
    "copies, sums, zeros": r"elementwise|[mM]em(cpy|set)|[cC]at|[fF]ill|copy|reduce|index|scatter|gather|aten::",
}
OTHER = "other"
# The longest pauses that the file lists.
PAUSES = 20


def write_profile(step: Callable[[], None], device: torch.device, file: Path) -> dict[str, float]:
    """Profile one step and write the table of its most expensive operations.

    Returns:
        Milliseconds of the device's time by kind of work, for every kind of ``KINDS`` and ``OTHER``.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    guard: AbstractContextManager = torch.cuda.device(device) if on_cuda else nullcontext()
    with guard, profile(activities=activities) as record:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    averages = record.key_averages()
    order = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    file.write_text(averages.table(sort_by=order, row_limit=60, max_name_column_width=100))
    if not on_cuda:
        return by_kind((row.key, row.self_cpu_time_total / 1e3) for row in averages)
    # Rows of host operations repeat the time of the kernels that they launched, so only kernels are counted.
    work = [event for event in record.events() if event.device_type == DeviceType.CUDA]
    found = pauses((event.time_range.start, event.time_range.end, event.name) for event in work)
    with file.open("a") as table:
        table.write(
            f"\nThe device waited {sum(length for length, *_ in found) / 1e3:.1f} ms between kernels. Longest, ms:\n"
        )
        for length, before, after in sorted(found, reverse=True)[:PAUSES]:
            table.write(f"{length / 1e3:8.3f}  {before[:80]}  ->  {after[:80]}\n")
    kernels = (row for row in averages if row.device_type == DeviceType.CUDA)
    return by_kind((row.key, row.self_device_time_total / 1e3) for row in kernels)


def pauses(kernels: Iterable[tuple[float, float, str]]) -> list[tuple[float, str, str]]:
    """Return when no kernel ran: ``(length, name of the kernel before, after)``.

    Args:
        kernels: ``(start, end, name)``, in any order; those of several streams may overlap.
    """
    found, last, before = [], float("inf"), ""
    for start, end, name in sorted(kernels):
        if start > last:
            found.append((start - last, before, name))
        if not before or end > last:
            last, before = end, name
    return found


def by_kind(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Add up ``(name, milliseconds)`` pairs by kind of work."""
    milliseconds_by_kind = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, milliseconds in times:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)
        milliseconds_by_kind[kind] += milliseconds
    return milliseconds_by_kind
