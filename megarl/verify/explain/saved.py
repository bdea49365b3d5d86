# SPDX-License-Identifier: Apache-2.0
"""Name the first saved tensor that differs, in cases where all that was computed before saving agrees."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from safetensors.torch import load_file

from megarl.lora.files.peft_folder import WEIGHTS
from megarl.verify.bounds import (
    ADAPTER,
    BASE_LOGPROBS,
    CHECKPOINT,
    EXPORTED_WEIGHTS,
    GRADIENT_NORM,
    GRADIENTS,
    LOGPROBS,
    MERGED_LOAD,
    MERGED_WEIGHTS,
    PEFT_LOAD,
    UPDATE,
)
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Finding, Outcome, compare_adapters
from megarl.verify.explain.parts import beyond, first_of, forward_order
from megarl.verify.reference.reference_runs import exact_sums

# Rows whose failure explains a difference in what was saved.
CAUSES = {LOGPROBS, BASE_LOGPROBS, GRADIENTS, GRADIENT_NORM}


def first_saved(place: Place, rows: set[str]) -> list[str]:
    """Describe a place's failed rows: the first tensor that differs, in the order of the forward pass."""
    lines, case = [], place.case
    if rows & {ADAPTER, UPDATE, PEFT_LOAD}:
        saved = load_file(place.folder / "adapter" / WEIGHTS)
        lines.append(f"first tensor of the saved adapter: {_first(case, saved)}")
    for row, folder in ((MERGED_WEIGHTS, "merged"), (EXPORTED_WEIGHTS, "exported")):
        if rows & {row, MERGED_LOAD if row == MERGED_WEIGHTS else row}:
            lines.append(f"first {folder} weight: {_first_merged(place, row, folder)}")
    if CHECKPOINT in rows:
        lines.append(f"first tensor after the checkpoint: {_first(case, case.read(place.resumed))}")
    return lines


def _first(case: Case, adapter: Mapping[str, torch.Tensor]) -> str:
    """Find the first tensor of a trained adapter whose error exceeds its own bound."""
    truth = case.read("truth")
    theirs = case.read("yardstick").adapter if case.has("yardstick") else truth.adapter

    def each() -> Iterator[str | None]:
        """Yield the rows of each tensor that exceed their bounds."""
        for name in sorted(truth.adapter, key=forward_order(case)):
            pairs = zip(_alone(case, name, adapter, truth), _alone(case, name, theirs, truth), strict=True)
            for finding, yardstick in pairs:
                yield beyond(finding.worst, finding.error, case.rule.bounds[finding.row], yardstick.error)

    return first_of(each(), "each tensor alone agrees")


def _alone(case: Case, name: str, adapter: Mapping[str, torch.Tensor], truth: Outcome) -> list[Finding]:
    """Return the rows about the adapter, for one tensor."""
    expected = replace(
        truth,
        adapter={name: truth.adapter[name]},
        start={name: truth.start[name]},
        leeway={name: truth.leeway[name]} if name in truth.leeway else {},
    )
    alone = {name: adapter[name]} if name in adapter else {}
    return compare_adapters(alone, expected, case.rule)


def _first_merged(place: Place, row: str, folder: str) -> str:
    """Find the first tensor of a merged model whose distance from the exact sum exceeds its own bound."""
    rule = place.case.rule
    beyond_bound: dict[str, str | None] = {}
    for name, exact, tensor in exact_sums(place.case.model, place.folder / "adapter", place.folder / folder):
        error, yardstick = (
            rule.measure(row, {name: one}, {name: exact}).error for one in (tensor, exact.to(tensor.dtype))
        )
        beyond_bound[name] = beyond(name, error, rule.bounds[row], yardstick)
    return first_of(
        (beyond_bound[name] for name in sorted(beyond_bound, key=forward_order(place.case))), "each weight alone agrees"
    )
