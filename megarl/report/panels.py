# SPDX-License-Identifier: Apache-2.0
"""List what is shown of a run: the panels of its curves and the rows of its summary. Imports nothing heavy."""

from collections.abc import Mapping
from typing import Any

# Panel title -> (metrics with their labels, axis label). The panels of reward and time are drawn separately.
LINES = {
    "loss": ({"loss": "loss"}, "loss"),
    "gradient norm": ({"grad_norm": "before clipping"}, "norm"),
    "entropy": ({"entropy": "of the policy"}, "nats per token"),
    "length": ({"response_tokens": "mean of completions"}, "tokens"),
    "mismatch": ({"mismatch_mean": "mean", "mismatch_max": "max"}, "|sampler - trainer| logprob (nats)"),
}
SHARES = {"groups_without_signal": "all rewards alike", "truncated": "truncated"}

# Row title -> the keys in the summary, one for each value, and their format.
ROWS = (
    ("reward, first steps -> last steps", ("reward_first", "reward_last"), "{:.3f}"),
    ("reward, best step", ("reward_max",), "{:.3f}"),
    ("held-out reward, before -> after", ("held_out_before/reward", "held_out_after/reward"), "{:.3f}"),
    ("held-out correct, before -> after", ("held_out_before/correct", "held_out_after/correct"), "{:.1%}"),
    ("groups without signal", ("groups_without_signal",), "{:.0%}"),
    ("prompts left out, too long", ("dropped_prompts",), "{}"),
    ("mismatch of sampler and trainer, mean, max", ("mismatch_mean", "mismatch_max"), "{:.1e}"),
    ("adapter matrices with a gradient, of all", ("grad_tensors", "adapter_tensors"), "{:.0f}"),
    ("tokens per second, trained, sampled", ("train_tokens_per_second", "sample_tokens_per_second"), "{:,.0f}"),
    ("sync, median s", ("sync_seconds",), "{:.2f}"),
    ("training stopped for a checkpoint, median s", ("checkpoint_stop_seconds",), "{:.2f}"),
    ("peak memory, of devices, GiB", ("peak_memory_gib", "peak_device_memory_gib"), "{:.1f}"),
    ("seconds in all", ("seconds",), "{:.0f}"),
)


def cells(summary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the rows of a summary: title -> its values as texts. A row without a number is left out."""
    flat = numbers(summary)
    rows = {title: [form.format(flat[name]) for name in names if name in flat] for title, names, form in ROWS}
    return {title: values for title, values in rows.items() if values}


def numbers(summary: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a summary; those in a dictionary have both keys (``held_out_after/reward``)."""
    flat: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = value
    return flat


def names_with(rows: list[dict[str, Any]], prefix: str) -> list[str]:
    """Return the metrics of any row whose name begins with ``prefix``, sorted."""
    return sorted({name for row in rows for name in row if name.startswith(prefix)})
