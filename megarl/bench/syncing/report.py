# SPDX-License-Identifier: Apache-2.0
"""Format the table of `megarl bench sync`."""

from typing import Any

from megarl.bench.report import aligned
from megarl.bench.syncing.choose import verdict

STAGES = (
    "trainer/export", "trainer/gather", "trainer/hash", "trainer/wire", "trainer/receipts",
    "receiver/hash", "receiver/load", "prepare", "verify", "flip",
)  # fmt: skip


def sync_table(report: dict[str, Any]) -> str:
    """Return the times of all kinds of weights as text, in milliseconds, with the ceilings and the peers below."""
    settings = report["settings"]
    layers = "" if settings["layers"] is None else f" with {settings['layers']} layers"
    ranks = f" of {settings['tensor']} ranks" if settings["tensor"] > 1 else ""
    if settings["data"] > 1:
        ranks += f", {settings['data']} trainer ranks"
    head = (
        f"{settings['model']}{layers}: r={settings['r']}, {settings['dtype']}, {settings['engines']} engine(s){ranks}, "
        f"transport {report['transport']}; milliseconds, medians"
    )
    columns = ("weights", "tensors", "MiB", "sync", "worst", "GB/s", "of ceiling", *STAGES, "pause", "|logprob|")
    rows = aligned([columns, *(_row(row, report["ceilings"]["copy"]) for row in report["rows"])])
    return "\n".join([head, "", *rows, "", *_notes(report)])


def _row(row: dict[str, Any], ceiling: float) -> tuple[str, ...]:
    rate = row["nbytes"] / row["ms"] / 1e6
    ceiling = row.get("broadcast", ceiling)
    optional = (("pause_ms", "{:.1f}"), ("logprob_difference", "{:.1e}"))
    return (
        row["kind"],
        str(row["tensors"]),
        f"{row['nbytes'] / 2**20:.1f}",
        f"{row['ms']:.2f}",
        f"{row['worst_ms']:.2f}",
        f"{rate:.1f}",
        f"{rate / ceiling:.1%}",
        *(f"{row['stages_ms'].get(stage, 0.0):.2f}" for stage in STAGES),
        *(form.format(row[name]) if name in row else "-" for name, form in optional),
    )


def _notes(report: dict[str, Any]) -> list[str]:
    lines = [f"one copy inside the device: {report['ceilings']['copy']:.0f} GB/s"]
    rates = ", ".join(f"{row['kind']} {row['broadcast']:.0f}" for row in report["rows"] if "broadcast" in row)
    if rates:
        lines.append(f"a NCCL broadcast of as many bytes, the ceiling of each row: {rates} GB/s")
    own = "GPU 0" if report["settings"]["data"] == 1 else f"the first {report['settings']['data']}"
    for row in report["rows"]:
        if grown := row.get("memory_mib"):
            gpus = ", ".join(f"GPU {gpu} {mib:,.0f}" for gpu, mib in grown.items())
            lines.append(f"{row['kind']}: memory that the syncs took, MiB: {gpus} (the trainer has {own})")
    if disk := report.get("disk"):
        by_disk = disk["save_ms"] + disk["load_ms"]
        lines.append(
            f"save to memory-backed files and load by vLLM: {disk['save_ms']:.1f} + {disk['load_ms']:.1f} ms; "
            f"a new engine: {disk['start_seconds']:.1f} s"
        )
        for row in report["rows"]:
            if row["kind"] == "adapter":
                lines.append(f"a sync of the adapter is {by_disk / row['ms']:.0f} times as fast as save and load")
    if "disk_error" in report:
        lines.append(f"vLLM's own way (save and load) failed: {report['disk_error']}")
    if moonshot := report.get("moonshot"):
        lines += _against_moonshot(moonshot, report["rows"])
    if "moonshot_error" in report:
        lines.append(f"checkpoint-engine failed: {report['moonshot_error']}")
    lines += verdict(report["rows"])
    lines += [
        "sync: from the end of the device's work until the new version serves; trainer/* and receiver/* overlap",
        "pause: how much longer a request that runs takes if a sync begins meanwhile",
    ]
    return lines


def _against_moonshot(moonshot: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return what checkpoint-engine took, and how much faster syncs of as many weights are."""
    register, update = moonshot["register_ms"], moonshot["update_ms"]
    lines = [
        f"checkpoint-engine {moonshot['version']}, {moonshot['nbytes'] / 2**20:,.0f} MiB, 1 engine: register "
        f"{register:.0f} + update {update:.0f} ms"
    ]
    for row in rows:
        if row["kind"] in ("base", "merged"):
            times, of_update = (register + update) / row["ms"], update / row["ms"]
            lines.append(
                f"a sync of {row['kind']} is {times:.0f} times as fast as register and update, "
                f"{of_update:.0f} times as fast as update alone"
            )
    return lines
