# SPDX-License-Identifier: Apache-2.0
"""Format the table of `megarl bench train`."""

from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "contender", "tokens/s", "step ms", "forward", "logprobs", "backward", "optimizer", "logprob pass", "peak GiB",
    "of GEMM", "/ PEFT", "memory / PEFT", "LoRA / full",
)  # fmt: skip

# Columns after the second, at a layout of several ranks.
RANKS = ("ranks", "a rank", "one rank", "speed-up", "efficiency")

PHASES = ("forward", "logprobs", "backward", "optimizer")


def table(report: dict[str, Any]) -> str:
    """Return the comparison as text, with one row per contender and times in milliseconds."""
    done = [result for result in report["contenders"] if "error" not in result]
    rows = [COLUMNS, *(_row(result) for result in done)]
    if any(result["ranks"] > 1 for result in done):
        more = [RANKS, *(_ranks(result) for result in done)]
        rows = [(*row[:2], *own, *row[2:]) for row, own in zip(rows, more, strict=True)]
    lines = aligned(rows)
    lines += [f"{r['name']} failed: {r['error']}" for r in report["contenders"] if "error" in r]
    lines += [
        f"{result['name']} on one rank failed: {result['one_rank']['error']}"
        for result in report["contenders"]
        if "error" in result.get("one_rank", {})
    ]
    lines += [f"{name} is left out: {reason}" for name, reason in report["left_out"].items()]
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
    layers = "" if settings["layers"] is None else f" with {settings['layers']} layers"
    batch = f"{report['batch']} x {settings['length']} tokens"
    if report["batch"] > settings["sequences"]:
        batch += f" in micro-batches of {settings['sequences']}"
    switches = {"dropout": 0.0, "recompute": "none", "recompute_layers": None, "cuda_graphs": False, "compile": False}
    chosen = "".join(
        f", {name}={str(settings[name]).lower()}" for name, off in switches.items() if settings[name] != off
    )
    return (
        f"{settings['model']}{layers}, {report['layout']}: {batch}, r={settings['r']}, "
        f"{settings['dtype']}{chosen}, {settings['response']:.0%} of the tokens trained on; GEMM ceiling {gemm}; "
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


def _ranks(result: dict[str, Any]) -> tuple[str, ...]:
    one = result.get("one_rank", {}).get("tokens_per_second")
    return (
        str(result["ranks"]),
        f"{result['tokens_per_second'] / result['ranks']:,.0f}",
        _share(one, "{:,.0f}"),
        _share(result.get("speed_up"), "{:.2f}x"),
        _share(result.get("efficiency"), "{:.0%}"),
    )


def _name(result: dict[str, Any]) -> str:
    return result["name"] if result["name"] == result["backend"] else f"{result['name']} ({result['backend']})"


def _share(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _notes(report: dict[str, Any]) -> list[str]:
    """Return the notes that a reader needs to understand the numbers."""
    notes = ["peft: forward includes logits and loss. GEMM share: needed operations (no recomputed ones) per second."]
    settings = report["settings"]
    if any(result.get("ranks", 1) > 1 for result in report["contenders"]):
        notes.append(
            "tokens/s: of all ranks; a rank: of each of them; one rank: measured alone; efficiency: a rank against "
            "one rank. Milliseconds are rank 0's, memory is the worst rank's. of GEMM, / PEFT: a rank."
        )
        if settings["data"] > 1:
            alone = report["batch"] // settings["data"]
            notes.append(f"data: the batch grows with it; one rank and peft have {alone} sequences a step")
    if settings["pipeline"] > 1:
        notes.append("pipeline: the passes of several micro-batches overlap, so only the whole step is timed")
    for result in report["contenders"]:
        if "over_fast" in result:
            notes.append(f"bitwise: a step takes {result['over_fast']:.2f}x the time of local's")
        if result["name"] == "full" and result.get("optimizer") is False:
            notes.append(
                "full: forward and backward only, its optimizer state does not fit (gradients are not added up over "
                "ranks); LoRA / full leaves LoRA's optimizer out too"
            )
    return notes
