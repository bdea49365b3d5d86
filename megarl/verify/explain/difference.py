# SPDX-License-Identifier: Apache-2.0
"""Explain a failed row: find the first module output, gradient (in backward order) or saved tensor that differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.model.megatron_model import MegatronModel
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.parallel.groups import Groups
from megarl.verify.bounds import BASE_LOGPROBS, GRADIENT_NORM, GRADIENTS, LOGPROBS
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Row, is_worse
from megarl.verify.explain.parts import beyond, first_of, forward_order
from megarl.verify.explain.saved import CAUSES, first_saved
from megarl.verify.explain.trace import LOGPROBS as LM_HEAD
from megarl.verify.explain.trace import Trace, trace_model, trace_reference
from megarl.verify.launch import report_progress, run_ranks
from megarl.verify.ranks import Stage, build, each_layout
from megarl.verify.reference.hf_peft import all_logprobs, load_reference
from megarl.verify.reference.reference_runs import DTYPES, run_shared
from megarl.verify.reference.surrogate_loss import SurrogateLoss

# Above the bound of a row, because activations accumulate rounding layer by layer.
BOUND = 1e-5


@dataclass(frozen=True)
class Suspect:
    """A place with the names of its failed rows."""

    place: Place
    rows: tuple[str, ...]

    @property
    def adapter(self) -> bool:
        """True to trace with the adapter on; False if only the logprobs without it are wrong."""
        return not (BASE_LOGPROBS in self.rows and LOGPROBS not in self.rows)

    @property
    def trace(self) -> str:
        """Name of the reference's trace."""
        return f"trace-{'on' if self.adapter else 'off'}"


def explain(
    failed: Sequence[tuple[Place, Sequence[Row]]],
    prepare: Callable[[], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, list[str]]:
    """Find the first difference at each place with failed rows.

    Args:
        failed: places with their failed rows.
        prepare, report: as in ``run_ranks``.

    Returns:
        Lines of text by the place's key.
    """
    suspects = [Suspect(place, tuple(row.name for row in rows)) for place, rows in failed]
    wanted = list({(s.place.case.name, s.adapter): s for s in suspects}.values())
    yardstick = dict(
        zip([(s.place.case.name, s.adapter) for s in wanted], run_shared(_trace, wanted, report), strict=True)
    )
    lines: dict[str, list[str]] = {}
    for world in sorted({s.place.config.parallel.world_size for s in suspects}):
        here = [s for s in suspects if s.place.config.parallel.world_size == world]
        results = run_ranks(_compare_ranks, world, here, prepare=prepare, report=report)
        for index, suspect in enumerate(here):
            modules, gradients = (_largest([rank[index][part] for rank in results]) for part in (0, 1))
            order = yardstick[suspect.place.case.name, suspect.adapter]
            lines[suspect.place.key] = _describe(suspect, modules, gradients, order)
    later = [suspect for suspect in suspects if not CAUSES & set(suspect.rows)]
    for suspect, saved in zip(later, run_shared(_first_saved, later, report), strict=True):
        lines[suspect.place.key] += saved
    return lines


def _first_saved(suspect: Suspect) -> list[str]:
    return first_saved(suspect.place, set(suspect.rows))


def _trace(suspect: Suspect) -> dict[str, float]:
    """Store the reference's trace; return the yardstick's error per module, in forward order."""
    case = suspect.place.case
    dtype, device = case.read("truth-is")
    report_progress(f"{case.name}: outputs of Hugging Face's modules")
    samples = case.traced_samples()
    traces = {}
    for kind in (dtype, case.dtype):
        model = load_reference(case.model, case.adapter, DTYPES[kind]).to(device)
        if not suspect.adapter:
            model.base_model.disable_adapter_layers()
        trace = trace_reference(model, names_of(read_config(case.model)), samples, case.vocab_size)
        traces[kind] = trace | {LM_HEAD: _joined(all_logprobs(model, samples, case.temperature))}
    case.write(suspect.trace, traces[dtype])
    return _module_errors(case, traces[case.dtype], traces[dtype])


def _compare_ranks(suspects: Sequence[Suspect]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """On each rank, return the errors of this stage's modules and of all gradients."""
    stages = [Stage(suspect.place) for suspect in suspects]
    return [_compare_here(suspect, groups) for suspect, (_, groups) in zip(suspects, each_layout(stages), strict=True)]


def _compare_here(suspect: Suspect, groups: Groups) -> tuple[dict[str, float], dict[str, float]]:
    place, case = suspect.place, suspect.place.case
    report_progress(f"{place.key}: outputs of modules and gradients")
    model = build(place, groups)
    # Only Megatron's places are explained.
    assert isinstance(model, MegatronModel)
    model.load_adapter(case.adapter)
    samples = case.traced_samples()
    names = names_of(model.hf_config)
    trace, logprobs = trace_model(model, names, samples, adapter=suspect.adapter)
    modules = _module_errors(case, trace | {LM_HEAD: _joined(logprobs)}, case.read(suspect.trace))
    model.forward_backward(model.pack(case.samples(), case.weights(0)), SurrogateLoss())
    expected = case.read("truth").gradients
    return modules, _each(GRADIENTS, case, model.gradients(), expected)


def _module_errors(case: Case, actual: Trace, expected: Trace) -> dict[str, float]:
    """Return the error of each module in ``actual``, in the order of ``expected``."""
    return _each(LOGPROBS, case, actual, {name: value for name, value in expected.items() if name in actual})


def _each(
    row: str, case: Case, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Map each name to the error of that tensor alone."""
    rule = case.rule
    return {n: rule.measure(row, {n: actual[n]}, {n: t}).error for n, t in expected.items() if n in actual}


def _describe(
    suspect: Suspect, modules: Mapping[str, float], gradients: Mapping[str, float], yardstick: Mapping[str, float]
) -> list[str]:
    fixed = BOUND if suspect.place.case.dtype == "float32" else 0.0
    traced = [name for name in yardstick if name in modules]
    beyond_bound = (beyond(name, modules[name], fixed, yardstick[name]) for name in traced)
    lines = [f"first difference: {first_of(beyond_bound, f'all {len(traced)} traced outputs agree')}"]
    if {GRADIENTS, GRADIENT_NORM} & set(suspect.rows):
        lines.append(_first_gradient(suspect.place.case, gradients))
    return lines


def _first_gradient(case: Case, gradients: Mapping[str, float]) -> str:
    yardstick: dict[str, float] = {}
    if case.has("yardstick"):
        yardstick = _each(GRADIENTS, case, case.read("yardstick").gradients, case.read("truth").gradients)
    fixed, backwards = case.rule.bounds[GRADIENTS], sorted(gradients, key=forward_order(case), reverse=True)
    beyond_bound = (beyond(name, gradients[name], fixed, yardstick.get(name, 0.0)) for name in backwards)
    return f"first gradient, backwards: {first_of(beyond_bound, 'each tensor alone agrees')}"


def _joined(logprobs: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(logprobs))


def _largest(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest error of each name over ranks; NaN counts as the largest."""
    merged: dict[str, float] = {}
    for rank in errors:
        for name, error in rank.items():
            if is_worse(error, merged.get(name, -1.0)):
                merged[name] = error
    return merged
