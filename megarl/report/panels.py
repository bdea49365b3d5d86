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
# The same for asynchronous runs; the first one tells these apart.
STALENESS = {
    "staleness of tokens": ({"staleness_mean": "mean", "staleness_max": "max"}, "versions"),
    "groups": (
        {
            "repeated_groups": "too old, sampled again",
            "stale_groups": "too old, trained on",
            "left_out_groups": "without signal, replaced",
        },
        "groups of the step",
    ),
    "buffer": ({"buffered_groups": "scored, waiting", "running_groups": "sampled or scored"}, "groups"),
}
# Metrics of the share of tokens of an age begin so.
AGES = "staleness/"
SHARES = {"groups_without_signal": "all rewards alike", "truncated": "truncated"}

# Metrics of an evaluation that say how long completions are, and ends of the names of an interval's limits.
SIZES, LIMITS = ("response_tokens", "truncated"), ("_low", "_high")
# Keys of ``summary.json`` that hold the evaluations before the first step and after the last.
BEFORE, AFTER = "eval_before/", "eval_after/"

# Row title -> the keys in the summary, one for each value, and their format.
ROWS = (
    ("reward, first steps -> last steps", ("reward_first", "reward_last"), "{:.3f}"),
    ("reward, best step", ("reward_max",), "{:.3f}"),
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
    return {title: values for title, values in (rows | _evaluation_cells(flat)).items() if values}


def _evaluation_cells(flat: Mapping[str, float]) -> dict[str, list[str]]:
    """Return a row for each metric of the evaluations: its values with their intervals, before and after."""
    both = [{name.removeprefix(end): flat[name] for name in flat if name.startswith(end)} for end in (BEFORE, AFTER)]
    ends = [end for end in both if end]
    names = {name: None for end in ends for name in metric_names(end)}
    arrow = ", before -> after" if len(ends) > 1 else ""
    return {f"{name} [95%]{arrow}": [with_interval(end, name) for end in ends if name in end] for name in names}


def metric_names(values: Mapping[str, float]) -> list[str]:
    """Return the names of an evaluation's numbers that are no limits of an interval and no lengths."""
    limits = {name + end for name in values for end in LIMITS}
    return [name for name in values if name not in limits and not name.endswith(SIZES)]


def with_interval(values: Mapping[str, float], name: str) -> str:
    """Return ``0.412 [0.330, 0.500]``."""
    limits = [values[name + end] for end in LIMITS if name + end in values]
    return f"{values[name]:.3f}{' [{:.3f}, {:.3f}]'.format(*limits) if len(limits) == len(LIMITS) else ''}"


def evaluation_numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation's ``results.json``: ``KEY/METRIC``, and with ``_low`` and ``_high``."""
    flat: dict[str, float] = {}
    for name, value in numbers(tree.get("sets", {}) if isinstance(tree.get("sets"), Mapping) else {}).items():
        key, _, rest = name.partition("/metrics/")
        metric, _, end = rest.rpartition("/")
        if metric:
            flat[f"{key}/{metric}{'' if end == 'value' else f'_{end}'}"] = value
    return flat


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
