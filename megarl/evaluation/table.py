# SPDX-License-Identifier: Apache-2.0
"""Set results of several targets side by side, with the difference to the first one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.evaluation.intervals import Estimate, average
from megarl.evaluation.results import SetResult

Results = Mapping[str, SetResult]


def differences(first: Results, other: Results) -> dict[str, dict[str, Estimate]]:
    """Return set -> metric -> the mean difference of ``other`` and ``first`` over the same prompts.

    Prompts are paired, so the interval is of the difference, and is narrower than those of the two values suggest.
    """
    changes: dict[str, dict[str, Estimate]] = {}
    for key, result in other.items():
        for name, values in result.values.items():
            if key in first and name in first[key].values and first[key].values[name].shape == values.shape:
                change = values - first[key].values[name]
                if known := list(change[~np.isnan(change)]):
                    changes.setdefault(key, {})[name] = average(np.array(known))
    return changes


def short_labels(labels: Sequence[str]) -> list[str]:
    """Return the last part of each path, where these differ."""
    last = [label.rstrip("/").rpartition("/")[2] for label in labels]
    return last if len(set(last)) == len(last) else list(labels)


def rows(results: Mapping[str, Results]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: one row for each metric of each set.

    Args:
        results: target -> its results.
    """
    results = dict(zip(short_labels(list(results)), results.values(), strict=True))
    labels = list(results)
    changes = {label: differences(results[labels[0]], results[label]) for label in labels[1:]}
    head = ["set", "metric", *labels, *(f"{label} - first" for label in labels[1:])]
    lines = []
    for key, name in dict.fromkeys(
        (each, name) for one in results.values() for each in one for name in one[each].values
    ):
        cells = [one[key].estimates[name].text() if name in one[key].estimates else "-" for one in results.values()]
        for change in changes.values():
            cells.append(change[key][name].text("{:+.3f}") if name in change.get(key, {}) else "-")
        lines.append([key, name, *cells])
    return head, lines


def as_json(results: Mapping[str, Results]) -> dict[str, Any]:
    """Return everything as JSON-able values."""
    first = next(iter(results.values()))
    return {
        label: {
            "sets": {key: result.to_json() for key, result in one.items()},
            "difference_to_first": {
                key: {name: vars(estimate) for name, estimate in change.items()}
                for key, change in differences(first, one).items()
            },
        }
        for label, one in results.items()
    }
