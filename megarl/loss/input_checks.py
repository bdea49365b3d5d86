# SPDX-License-Identifier: Apache-2.0
"""Check the inputs of ``token_logprobs``."""

import torch

from megarl.errors import LossInputError
from megarl.loss.late_checks import require


def check_inputs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, vocab: int
) -> None:
    """Raise ``LossInputError`` for shapes, dtypes, labels or a temperature that do not fit."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise LossInputError(
            f"hidden_TH has shape {tuple(hidden.shape)}, weight_VH {tuple(weight.shape)}; "
            "both must have two dimensions and the same last one"
        )
    if hidden.dtype != weight.dtype:
        raise LossInputError(f"hidden_TH is {hidden.dtype}, weight_VH {weight.dtype}; cast one to the other's dtype")
    if labels.shape != hidden.shape[:1]:
        raise LossInputError(f"labels_T has shape {tuple(labels.shape)}, expected ({hidden.shape[0]},) like hidden_TH")
    if labels.dtype != torch.int64:
        raise LossInputError(f"labels_T is {labels.dtype}; it must be int64")
    if not 0.0 < temperature < float("inf"):
        raise LossInputError(f"temperature is {temperature}; it must be positive and finite")
    if len(labels):
        _check_range(labels, vocab)


def _check_range(labels: torch.Tensor, vocab: int) -> None:
    ends = torch.stack(labels.aminmax())

    def explain(good: list[bool]) -> None:
        low, high = ends.tolist()
        raise LossInputError(f"labels_T holds ids from {low} to {high}; they must be 0 to {vocab - 1}")

    require((ends >= 0) & (ends < vocab), explain)


def check_delta(inputs: torch.Tensor, factor: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ``LossInputError`` for a low-rank product that does not fit hidden states and weight."""
    expected = [(len(hidden), factor.shape[-1]), (len(weight), inputs.shape[-1])]
    if [tuple(inputs.shape), tuple(factor.shape)] != expected or {inputs.dtype, factor.dtype} != {weight.dtype}:
        raise LossInputError(
            f"deltas has {inputs.dtype} {tuple(inputs.shape)} and {factor.dtype} {tuple(factor.shape)}; with hidden_TH "
            f"{tuple(hidden.shape)} and weight_VH {tuple(weight.shape)} they must be [T, r], [V, r] and {weight.dtype}"
        )
