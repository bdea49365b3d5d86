# SPDX-License-Identifier: Apache-2.0
"""Set results of several targets side by side, with the difference to the first one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.evaluation.intervals import Estimate, average
from megarl.evaluation.results import SetResult

Results = Mapping[str, SetResult]


def differences(first: Results, other: Results) -> dict[str, dict[str, Estimate]]:
    """Return set -> metric -> the mean difference of ``other`` and ``first`` over the prompts that both answered.

    Prompts are paired, so the interval is of the difference, and is narrower than those of the two values suggest.
    """
    changes: dict[str, dict[str, Estimate]] = {}
    for key in [key for key in other if key in first]:
        theirs, ours = (places_of(one[key]) for one in (first, other))
        both = [place for place in ours if place in theirs]
        for name in [name for name in other[key].values if name in first[key].values]:
            values = other[key].values[name][[ours[place] for place in both]]
            change = values - first[key].values[name][[theirs[place] for place in both]]
            if known := list(change[~np.isnan(change)]):
                changes.setdefault(key, {})[name] = average(np.array(known))
    return changes


def places_of(result: SetResult) -> dict[tuple[str, int], int]:
    """Return each prompt's place among the set's; a prompt is its id, and how many with that id are before it."""
    seen: Counter[str] = Counter()
    places = {}
    for place, prompt in enumerate(result.measured.prompts):
        places[prompt.id, seen[prompt.id]] = place
        seen[prompt.id] += 1
    return places


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
