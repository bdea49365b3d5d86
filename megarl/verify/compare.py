# SPDX-License-Identifier: Apache-2.0
"""Compare two computations of the same training steps, and judge the differences (see ``megarl.verify``)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megarl.peft.names import PREFIX
from megarl.verify.bounds import (
    ADAPTER,
    BASE_LOGPROBS,
    BASE_WEIGHTS,
    BFLOAT16_ONLY,
    BOUNDS,
    CHECKPOINT,
    EACH_GRADIENT,
    EACH_SLACK,
    ENTROPY,
    EXPORTED_WEIGHTS,
    FLOAT32_ONLY,
    GRADIENT_NORM,
    GRADIENTS,
    LOGPROBS,
    MERGED_WEIGHTS,
    MOST_BFLOAT16,
    MOST_FLOAT32,
    MOST_ROUNDED,
    NOISE,
    OF_LOGPROBS,
    SLACK,
    UPDATE,
)


@dataclass(frozen=True)
class Outcome:
    """Results of some updates on one batch, by megarl or by the reference.

    Attributes:
        logprobs: logprobs of each sample before the first update, ``[R]``.
        base_logprobs: the same with the adapter disabled.
        entropy: mean over the response tokens, in nats.
        gradients: PEFT name -> whole gradient of the first update, before clipping.
        norms: global gradient norm of each update.
        adapter: PEFT name -> tensor after the updates.
        start: PEFT name -> tensor before the updates; reference only.
        leeway: PEFT name -> error of each element that is allowed because AdamW magnifies rounding; reference only.
    """

    logprobs: list[np.ndarray]
    base_logprobs: list[np.ndarray]
    entropy: float
    gradients: dict[str, torch.Tensor]
    norms: list[float]
    adapter: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    leeway: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The error of one row and its worst tensor (sample, update); for ``EACH_GRADIENT`` also each tensor's error."""

    row: str
    worst: str
    error: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A finding with its bound, as reported."""

    name: str
    worst: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """True if the error is within the bound. NaN never passes."""
        return self.error <= self.bound

    @property
    def severity(self) -> float:
        """Error over bound. The row with the largest is the first to look at."""
        if self.bound > 0 and math.isfinite(self.error):
            return self.error / self.bound
        return 0.0 if self.passed else math.inf


@dataclass(frozen=True)
class Rule:
    """The way in which errors are measured and judged for one dtype; see the package's docstring.

    Attributes:
        bounds: fixed bound of each row that the dtype has.
        most: largest bound of each row, whatever the yardstick's error.
        slack: factor of the yardstick's error that is allowed.
        by_norm: True measures all tensors of a row together, by norm.
    """

    bounds: Mapping[str, float]
    most: Mapping[str, float]
    slack: float
    by_norm: bool

    @classmethod
    def of(cls, dtype: str, *, routers: bool) -> "Rule":
        """Return the rule for ``model.dtype``, for a model with or without routers."""
        if dtype == "float32":
            bounds = {row: bound for row, bound in BOUNDS.items() if row not in BFLOAT16_ONLY}
            most = {row: MOST_FLOAT32 * bound for row, bound in bounds.items()}
            most |= dict.fromkeys((MERGED_WEIGHTS, EXPORTED_WEIGHTS), MOST_ROUNDED)
            return cls(bounds, most, SLACK, by_norm=False)
        # Exported weights are merged in float32, so no coarse dtype excuses a difference.
        bounds = {row: 0.0 for row in BOUNDS if row not in FLOAT32_ONLY} | {EXPORTED_WEIGHTS: BOUNDS[EXPORTED_WEIGHTS]}
        most = dict.fromkeys(bounds, MOST_BFLOAT16) | {BASE_WEIGHTS: 0.0}
        return cls(bounds, most, 2.0 if routers else 1.1, by_norm=True)

    def judge(self, finding: Finding, yardstick_error: float) -> Row:
        """Judge a finding, given the yardstick's error in its row."""
        return self._row(finding, self.slack * yardstick_error)

    def judge_each(self, finding: Finding, yardstick_errors: Mapping[str, float]) -> Row:
        """Judge ``EACH_GRADIENT`` by the rule for single tensors.

        Args:
            finding: the finding, with ``parts``.
            yardstick_errors: the yardstick's error of each tensor.
        """
        kept = {name: error for name, error in finding.parts.items() if yardstick_errors.get(name, 0.0) <= NOISE}
        if not kept:
            return self._row(finding, 0.0)
        worst = _worst(finding.row, kept)
        if lost := len(finding.parts) - len(kept):
            noisy = f"{worst.worst} ({lost} of {len(finding.parts)} left out: Hugging Face's are noise)"
            worst = replace(worst, worst=noisy)
        return self._row(worst, EACH_SLACK * max(yardstick_errors.get(name, 0.0) for name in kept))

    def _row(self, finding: Finding, allowed: float) -> Row:
        row = finding.row
        # NaN cannot be compared; the fixed bound is used instead.
        bound = max(self.bounds[row], min(allowed, self.most[row])) if math.isfinite(allowed) else self.bounds[row]
        return Row(row, finding.worst.replace(PREFIX, ""), finding.error, bound)

    def yardstick(self, row: str, yardstick_errors: Mapping[str, float]) -> float:
        """Select from the yardstick's errors the one that a row is judged by; 0 if there is none.

        The reference saves no checkpoints, so that row takes another's. The rows of logprobs share the largest, because
        the worst conditioned sample changes with the adapter.
        """
        if row == CHECKPOINT:
            row = UPDATE if self.by_norm else ADAPTER
        alike = OF_LOGPROBS if row in OF_LOGPROBS and not self.by_norm else (row,)
        return max(yardstick_errors.get(one, 0.0) for one in alike)

    def needs_yardstick(self, finding: Finding) -> bool:
        """Return True if the finding exceeds the fixed bound, so that the yardstick is needed."""
        return not finding.error <= self.bounds[finding.row]

    def measure(
        self,
        row: str,
        actual: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        scale: Mapping[str, torch.Tensor] | None = None,
    ) -> Finding:
        """Compare tensors of the same names. A name on one side only is an infinite error.

        Args:
            row: row of the report.
            actual, expected: maps names to tensors.
            scale: tensors that errors are relative to; default: ``expected``.
        """
        if odd := sorted(actual.keys() ^ expected.keys()):
            return Finding(row, f"{odd[0]} ({'unexpected' if odd[0] in actual else 'missing'})", math.inf)
        for name, tensor in expected.items():
            if actual[name].shape != tensor.shape:
                return Finding(row, f"{name} {list(actual[name].shape)} for {list(tensor.shape)}", math.inf)
        scale = expected if scale is None else scale
        if self.by_norm:
            return _by_norm(row, actual, expected, scale)
        errors = {name: relative_error(actual[name], tensor, scale[name]) for name, tensor in expected.items()}
        return _worst(row, errors)


def compare(actual: Outcome, truth: Outcome, rule: Rule) -> list[Finding]:
    """Return every row that follows from two outcomes."""
    findings = [
        rule.measure(LOGPROBS, _by_sample(actual.logprobs), _by_sample(truth.logprobs)),
        rule.measure(BASE_LOGPROBS, _by_sample(actual.base_logprobs), _by_sample(truth.base_logprobs)),
        rule.measure(GRADIENTS, actual.gradients, truth.gradients),
        *compare_adapters(actual.adapter, truth, rule),
    ]
    if rule.by_norm:
        findings.append(_each(EACH_GRADIENT, actual.gradients, truth.gradients))
    else:
        entropies = ({"mean": torch.tensor([o.entropy], dtype=torch.float64)} for o in (actual, truth))
        norms = (
            {f"update {i + 1}": torch.tensor([n], dtype=torch.float64) for i, n in enumerate(o.norms)}
            for o in (actual, truth)
        )
        findings += [rule.measure(ENTROPY, *entropies), rule.measure(GRADIENT_NORM, *norms)]
    return findings


def compare_adapters(adapter: Mapping[str, torch.Tensor], truth: Outcome, rule: Rule) -> list[Finding]:
    """Return the rows about the adapter after the updates: element by element, and by norm how far it moved."""
    moved = {name: tensor.double() - truth.start[name].double() for name, tensor in truth.adapter.items()}
    if rule.by_norm:
        return [rule.measure(UPDATE, adapter, truth.adapter, moved)]
    elements = rule.measure(ADAPTER, _within(adapter, truth), truth.adapter)
    if not math.isfinite(elements.error):
        return [elements, Finding(UPDATE, elements.worst, elements.error)]
    return [elements, _by_norm(UPDATE, adapter, truth.adapter, moved)]


def _within(adapter: Mapping[str, torch.Tensor], truth: Outcome) -> dict[str, torch.Tensor]:
    """Move each element of the adapter towards the truth by its leeway. Other shapes stay as they are."""
    moved = dict(adapter)
    for name, leeway in truth.leeway.items():
        actual, expected = adapter.get(name), truth.adapter[name].double()
        if actual is not None and actual.shape == expected.shape:
            off = actual.double() - expected
            moved[name] = expected + off.sign() * (off.abs() - leeway.double()).clamp_min(0)
    return moved


def compare_logprobs(row: str, actual: Sequence[np.ndarray], truth: Sequence[np.ndarray], rule: Rule) -> Finding:
    """Compare logprobs, ``[R]`` per sample."""
    return rule.measure(row, _by_sample(actual), _by_sample(truth))


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """Return the largest absolute difference over the largest magnitude of ``scale`` (default: ``expected``)."""
    if not expected.numel():
        return 0.0
    scale = expected if scale is None else scale
    return float((actual.double() - expected.double()).abs().max() / scale.double().abs().max().clamp_min(1e-30))


def worst_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return each row's worst finding over several ranks, in the report's order. NaN is the worst."""
    rows: dict[str, Finding] = {}
    for finding in findings:
        known = rows.get(finding.row)
        if known is None or is_worse(finding.error, known.error):
            rows[finding.row] = finding
    return [rows[row] for row in BOUNDS if row in rows]


def is_worse(error: float, known: float) -> bool:
    """Return True if an error is larger than another; NaN is larger than all others."""
    return _rank(error) > _rank(known)


def _rank(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _worst(row: str, errors: Mapping[str, float]) -> Finding:
    name = max(errors, key=lambda name: _rank(errors[name]))
    return Finding(row, name, errors[name])


def _by_norm(
    row: str,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    scale: Mapping[str, torch.Tensor],
) -> Finding:
    wrong = {name: _norm(actual[name].double() - tensor.double()) for name, tensor in expected.items()}
    size = math.sqrt(sum(_norm(scale[name].double()) ** 2 for name in expected))
    total = math.sqrt(sum(norm**2 for norm in wrong.values()))
    return Finding(row, _worst(row, wrong).worst, total / max(size, 1e-30))


def _each(row: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Finding:
    """Measure each tensor's difference over its own norm. A missing tensor counts as zeros."""
    parts = {}
    for name, tensor in expected.items():
        size, tensor_here = _norm(tensor), actual.get(name)
        fits = tensor_here is not None and tensor_here.shape == tensor.shape
        wrong = _norm(tensor_here.double() - tensor.double()) if tensor_here is not None and fits else size
        parts[name] = wrong / size if size else (0.0 if not wrong else math.inf)
    return replace(_worst(row, parts), parts=parts)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def _by_sample(arrays: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    return {f"sample {index}": torch.from_numpy(np.asarray(array)) for index, array in enumerate(arrays)}
