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
    "pointwise with adapters": r"^_(prepare|forward|backward|add|add_norm|gradients|through|slopes|slopes_of_a|sum)$",
    "optimizer": r"multi_tensor|adam",
    "copies, sums, zeros": r"elementwise|[mM]em(cpy|set)|[cC]at|[fF]ill|copy|reduce|index|scatter|gather|aten::",
}
OTHER = "other"
# The longest pauses that the file lists, and the host's calls listed for each.
PAUSES, CALLS = 20, 6
# Start, end and name of a kernel or of a call on the host, in microseconds.
Span = tuple[float, float, str]


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
    kernels_and_calls: tuple[list[Span], list[Span]] = [], []
    for event in record.events():
        span = (event.time_range.start, event.time_range.end, event.name)
        kernels_and_calls[event.device_type != DeviceType.CUDA].append(span)
    _append_pauses(*kernels_and_calls, file)
    kernels = (row for row in averages if row.device_type == DeviceType.CUDA)
    return by_kind((row.key, row.self_device_time_total / 1e3) for row in kernels)


def _append_pauses(kernels: list[Span], calls: list[Span], file: Path) -> None:
    """Append a list of the device's longest pauses, with what the host did meanwhile."""
    found, begin = pauses(kernels), min((start for start, *_ in kernels), default=0.0)
    lines = [f"\nThe device waited {sum(length for _, length, *_ in found) / 1e3:.1f} ms between kernels. Longest:"]
    for start, length, before, after in sorted(found, key=lambda pause: -pause[1])[:PAUSES]:
        lines.append(f"{length / 1e3:8.3f} ms at {(start - begin) / 1e3:.3f}: {before[:80]}  ->  {after[:80]}")
        lines += [f"{'':12}{shared / 1e3:.3f} ms: {name[:80]}" for shared, name in _meanwhile(calls, start, length)]
    with file.open("a") as table:
        table.write("\n".join(lines) + "\n")


def _meanwhile(calls: Iterable[Span], start: float, length: float) -> list[tuple[float, str]]:
    """Return the host's calls that fill most of a pause: the time that each shares with it, and its name."""
    shared = [(min(end, start + length) - max(begin, start), name) for begin, end, name in calls]
    return sorted((call for call in shared if call[0] > 0), reverse=True)[:CALLS]


def pauses(kernels: Iterable[Span]) -> list[tuple[float, float, str, str]]:
    """Return when no kernel ran: ``(start, length, name of the kernel before, after)``.

    Args:
        kernels: in any order; those of several streams may overlap.
    """
    found, last, before = [], float("inf"), ""
    for start, end, name in sorted(kernels):
        if start > last:
            found.append((last, start - last, before, name))
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
