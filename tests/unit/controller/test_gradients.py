# SPDX-License-Identifier: Apache-2.0
"""Check that a run stops if a part of its adapter never gets a gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.controller.gradients import GradientCheck
from megarl.errors import MegarlError
from megarl.model.optimizer.gradient_record import GradientRecord

A, B, FIRST, EXPERT = (
    "layers.0.q_proj.lora_A.weight",
    "layers.0.q_proj.lora_B.weight",
    "layers.0.mlp.experts.0.up.lora_A.weight",
    "layers.0.mlp.experts.11.up.lora_A.weight",
)


def recorder(said: list[str]) -> Any:
    """Return a recorder whose screen keeps what is said."""
    return SimpleNamespace(screen=SimpleNamespace(say=lambda text, style=None: said.append(text)))


class Trainers:
    """One rank with a record."""

    def __init__(self) -> None:
        self.record = GradientRecord([A, B, FIRST, EXPERT])

    def call(self, method: str) -> list:
        assert method == "never_with_gradient"
        return [self.record.never()]

    def update(self, *norms: float) -> dict[str, float]:
        """Make an update; return its metrics."""
        return self.record.take(torch.tensor([sum(norms), *norms]))


def test_matrices_that_get_gradients_one_after_the_other_pass() -> None:
    trainers, said = Trainers(), list[str]()
    check = GradientCheck(trainers, recorder(said), stop=True)  # type: ignore[arg-type]
    for norms in ((0, 1), (0, 0), (0, 1), (1, 1), (0, 0), (0, 1), (0, 1), (0, 1)):
        check.check(trainers.update(*norms, norms[1], 0))
    assert len(said) == 1 and "2 of the adapter's 4 matrices" in said[0]


def test_experts_that_all_have_no_gradient_stop_the_run() -> None:
    trainers = Trainers()
    check = GradientCheck(trainers, recorder([]), stop=True)  # type: ignore[arg-type]
    for _ in range(2):
        check.check(trainers.update(1, 1, 0, 0))
    with pytest.raises(MegarlError, match=rf"2 of the adapter's 4 matrices .*3 updates:\s+{FIRST}\s+{EXPERT}"):
        check.check(trainers.update(1, 1, 0, 0))


@pytest.mark.parametrize("stop", [True, False])
def test_a_matrix_that_never_has_a_gradient_stops_the_run_unless_told_not_to(stop: bool) -> None:
    trainers, said = Trainers(), list[str]()
    check = GradientCheck(trainers, recorder(said), stop=stop)  # type: ignore[arg-type]
    check.check(trainers.update(0, 1, 1, 0))
    check.check(trainers.update(0, 0, 0, 0))  # of completions without a signal
    check.check(trainers.update(0, 1, 0, 0))
    message = rf"1 of the adapter's 4 matrices had no gradient in any of 3 updates:\s+{A}"
    if stop:
        with pytest.raises(MegarlError, match=rf"{message}\s+train.require_gradients=false"):
            check.check(trainers.update(0, 1, 0, 0))
        return
    check.check(trainers.update(0, 1, 0, 0))
    check.check(trainers.update(0, 1, 0, 0))
    assert len(said) == 2 and A in said[1] and EXPERT not in said[1]
