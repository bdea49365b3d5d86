# SPDX-License-Identifier: Apache-2.0
"""Test training and evaluation mode: a model is switched once, and an adapter starts in its base layer's mode."""

import pytest
import torch

from megarl.lora.layers.parallel_linear import ParallelLoraLinear
from megarl.model.step.schedule import set_training
from megarl.model.weights.fusion import HeadLayout


class Counted(torch.nn.Sequential):
    """Counts how often its mode is set."""

    switches = 0

    def train(self, mode: bool = True) -> "Counted":
        self.switches += 1
        return super().train(mode)


def test_only_a_change_of_mode_visits_the_modules() -> None:
    chunk = Counted(torch.nn.Dropout(), torch.nn.Linear(2, 2))
    for training, switches in ((True, 0), (False, 1), (False, 1), (True, 2)):
        set_training([chunk], training)
        assert [module.training for module in chunk.modules()] == [training] * 3
        assert chunk.switches == switches


@pytest.mark.parametrize("training", [True, False])
def test_an_adapter_added_later_has_the_mode_of_its_base(training: bool) -> None:
    base = torch.nn.Linear(2, 2).train(training)
    assert ParallelLoraLinear(base, "single", HeadLayout(1, 1, 1), None).training is training  # type: ignore[arg-type]
