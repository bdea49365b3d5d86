"""Which tensor of what megarl saved differs first, where all that was computed before agrees."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from safetensors.torch import load_file

from megarl.lora.peft_io import WEIGHTS
from megarl.verify.cases import Case, Place
from megarl.verify.compare import (
    ADAPTER,
    BASE_LOGPROBS,
    CHECKPOINT,
    GRADIENT_NORM,
    GRADIENTS,
    LOGPROBS,
    MERGED_LOAD,
    MERGED_WEIGHTS,
    PEFT_LOAD,
    UPDATE,
    Finding,
    Outcome,
    compare_adapters,
)
from megarl.verify.parts import SLACK, forward_order, tell
from megarl.verify.truth import exact_sums

# Where one of these fails, what is saved follows from it.
CAUSES = {LOGPROBS, BASE_LOGPROBS, GRADIENTS, GRADIENT_NORM}


def first_saved(place: Place, rows: set[str]) -> list[str]:
    """Lines of text about a place's failed rows: the first tensor, in the order of the forward pass."""
    if rows & CAUSES:
        return []
    lines, case = [], place.case
    if rows & {ADAPTER, UPDATE, PEFT_LOAD}:
        lines.append(
            f"first tensor of the saved adapter: {_first(case, load_file(place.folder / 'adapter' / WEIGHTS))}"
        )
    if rows & {MERGED_LOAD, MERGED_WEIGHTS}:
        lines.append(f"first merged weight: {_first_merged(place)}")
    if CHECKPOINT in rows:
        lines.append(f"first tensor after the checkpoint: {_first(case, case.read(place.resumed))}")
    return lines


def _first(case: Case, adapter: Mapping[str, torch.Tensor]) -> str:
    """The first tensor of an adapter after the updates that is further off than its own bound."""
    truth, rule = case.read("truth"), case.rule
    own = _of_own(case, truth)
    for name in sorted(truth.adapter, key=forward_order(case)):
        for finding in _alone(case, name, adapter, truth):
            bound = max(rule.bounds[finding.row], SLACK * own(name).get(finding.row, 0.0))
            if not finding.error <= bound:
                return tell(finding.worst, finding.error, bound)
    return "none, each tensor alone agrees"


def _of_own(case: Case, truth: Outcome) -> Callable[[str], dict[str, float]]:
    """The yardstick's error of one tensor, by row."""
    if not case.has("own"):
        return lambda name: {}
    own = case.read("own").adapter
    return lambda name: {finding.row: finding.error for finding in _alone(case, name, own, truth)}


def _alone(case: Case, name: str, adapter: Mapping[str, torch.Tensor], truth: Outcome) -> list[Finding]:
    """The rows about the adapter, of one tensor."""
    expected = replace(
        truth,
        adapter={name: truth.adapter[name]},
        start={name: truth.start[name]},
        leeway={name: truth.leeway[name]} if name in truth.leeway else {},
    )
    alone = {name: adapter[name]} if name in adapter else {}
    return compare_adapters(alone, expected, case.rule)


def _first_merged(place: Place) -> str:
    case, rule = place.case, place.case.rule
    order, errors = forward_order(case), dict(_merged_errors(place))
    for name in sorted(errors, key=order):
        error, own = errors[name]
        bound = max(rule.bounds[MERGED_WEIGHTS], SLACK * own)
        if not error <= bound:
            return tell(name, error, bound)
    return "none, each weight alone agrees"


def _merged_errors(place: Place) -> Iterator[tuple[str, tuple[float, float]]]:
    """``(name, (error, error of the exact sum rounded once))``."""
    rule = place.case.rule
    for name, exact, tensor in exact_sums(place.case.model, place.folder / "adapter", place.folder / "merged"):
        error, own = (
            rule.measure(MERGED_WEIGHTS, {name: one}, {name: exact}).error for one in (tensor, exact.to(tensor.dtype))
        )
        yield name, (error, own)
