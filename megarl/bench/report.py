# SPDX-License-Identifier: Apache-2.0
"""Format the table of `megarl bench train`."""

from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "contender", "tokens/s", "step ms", "forward", "logprobs", "backward", "optimizer", "logprob pass", "peak GiB",
    "of GEMM", "/ PEFT", "memory / PEFT", "LoRA / full",
)  # fmt: skip

PHASES = ("forward", "logprobs", "backward", "optimizer")


def table(report: dict[str, Any]) -> str:
    """Return the comparison as text, with one row per contender and times in milliseconds."""
    done = [result for result in report["contenders"] if "error" not in result]
    lines = aligned([COLUMNS, *(_row(result) for result in done)])
    lines += [f"{r['name']} failed: {r['error']}" for r in report["contenders"] if "error" in r]
    profiled = [result for result in done if "device_ms" in result]
    return "\n".join([_head(report), "", *lines, "", *_notes(report), *_profiles(profiled)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with columns aligned to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _profiles(results: list[dict[str, Any]]) -> list[str]:
    """Return the device's time by kind of work in a profiled step. "idle" is the rest of the unprofiled step's time."""
    if not results:
        return []
    rows = [("milliseconds of a step", *(_name(result) for result in results))]
    for kind in results[0]["device_ms"]:
        rows.append((kind, *(f"{result['device_ms'][kind]:.1f}" for result in results)))
    idle = (max(0.0, result["step_ms"] - sum(result["device_ms"].values())) for result in results)
    rows.append(("idle", *(f"{time:.1f}" for time in idle)))
    return ["", *aligned(rows)]


def _head(report: dict[str, Any]) -> str:
    settings, ceiling = report["settings"], report["gemm_tflops"]
    gemm = "not measured" if ceiling is None else f"{ceiling:.1f} TFLOP/s"
    return (
        f"{settings['model']}: {settings['sequences']} x {settings['length']} tokens, r={settings['r']}, "
        f"{settings['dtype']}, {settings['response']:.0%} of the tokens trained on; GEMM ceiling {gemm}; "
        f"LoRA step {report['work']['lora'] / 1e9:.2f} GFLOP per token, full {report['work']['full'] / 1e9:.2f}"
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    phases = result["phases"]
    shown = [f"{phases[name]:.1f}" if name in phases else "-" for name in PHASES]
    return (
        _name(result),
        f"{result['tokens_per_second']:,.0f}",
        f"{result['step_ms']:.1f}",
        *shown,
        f"{result['logprob_pass_ms']:.1f}",
        f"{result['peak_gib']:.1f}",
        _share(result.get("gemm_share"), "{:.0%}"),
        _share(result.get("over_peft"), "{:.2f}x"),
        _share(result.get("memory_over_peft"), "{:.2f}x"),
        _share(result.get("lora_over_full"), "{:.2f}x"),
    )


def _name(result: dict[str, Any]) -> str:
    return result["name"] if result["name"] == result["backend"] else f"{result['name']} ({result['backend']})"


def _share(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _notes(report: dict[str, Any]) -> list[str]:
    """Return the notes that a reader needs to understand the numbers."""
    notes = ["peft: forward includes logits and loss. GEMM share: needed operations (no recomputed ones) per second."]
    for result in report["contenders"]:
        if result["name"] == "full" and result.get("optimizer") is False:
            notes.append(
                "full: forward and backward only, its optimizer state does not fit; LoRA / full leaves LoRA's "
                "optimizer out too"
            )
    return notes
