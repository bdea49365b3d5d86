# SPDX-License-Identifier: Apache-2.0
"""Format the table of `megarl bench loop`."""

from typing import Any

from megarl.bench.looping.rows import PHASES, of_longer_phase
from megarl.bench.report import aligned

COLUMNS = ("", "start-up", "step", *PHASES, "tokens/s", "worst mismatch")
TITLES = {"turns": "in turns", "side": "side by side"}


def loop_table(report: dict[str, Any]) -> str:
    """Return the seconds of both ways as text, with a row for each."""
    settings = report["settings"]
    given = f" ({' '.join(report['overrides'])})" if report["overrides"] else ""
    head = (
        f"{settings['model']}{given}: {settings['prompts']} prompts x {settings['samples']} completions of at most "
        f"{settings['response_tokens']} tokens a step, r={settings['r']}, {settings['dtype']}; seconds, means of "
        f"{settings['steps']} steps"
    )
    rows = [_row(TITLES[way], result) for way, result in report["ways"].items()]
    notes = []
    if len(rows) > 1:
        notes.append("the second run's start-up finds what the first one compiled")
    if "side" in report["ways"]:
        notes.append(
            f"side by side: train.max_staleness={settings['staleness']}; 'sample' is what a step waits, "
            "and the mismatch is that of versions too"
        )
    if (ratio := of_longer_phase(report["ways"])) is not None:
        notes.append(f"a step side by side takes {ratio:.2f} of the longer phase in turns")
    return "\n".join([head, "", *aligned([COLUMNS, *rows]), "", *notes])


def _row(title: str, result: dict[str, Any]) -> tuple[str, ...]:
    phases = (f"{result['phase_seconds'][phase]:.3f}" for phase in PHASES)
    rates = (f"{result['tokens_per_second']:,.0f}", f"{result['mismatch_max']:.1e}")
    return (title, f"{result['start_seconds']:.1f}", f"{result['step_seconds']:.3f}", *phases, *rates)
