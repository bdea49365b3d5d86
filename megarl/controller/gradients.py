# SPDX-License-Identifier: Apache-2.0
"""Stop a run in which a part of the adapter gets no gradient: it would train on, and learn less than it seems to."""

from collections.abc import Mapping

from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.recording.metrics import Recorder
from megarl.errors import MegarlError, first_few

# Updates with a gradient before a matrix without any counts as cut off. A new adapter's B is 0, so that its A has no
# gradient in the first of them.
UPDATES = 3


class GradientCheck:
    """Say after the first update how many matrices had a gradient; after some more, refuse those that never had one.

    Args:
        trainers: all ranks of the trainer.
        recorder: has the screen on which lines are said.
        stop: False only says it.
    """

    def __init__(self, trainers: TrainerGroup, recorder: Recorder, stop: bool) -> None:
        self._trainers, self._recorder, self._stop = trainers, recorder, stop
        self._said = self._over = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check a step's updates, of which the metrics are.

        Raises:
            MegarlError: matrices had no gradient in any of the first ``UPDATES`` updates that had one.
        """
        if self._over or not metrics.get("grad_norm"):
            return
        if not self._said:
            self._said = True
            self._recorder.screen.say(
                f"gradients: {metrics['grad_tensors']:.0f} of the adapter's {metrics['adapter_tensors']:.0f} matrices "
                "(while B is 0, as in a new adapter, A has none)"
            )
        updates, never = self._trainers.call("never_with_gradient")[0]
        if updates < UPDATES:
            return
        self._over = True
        if never:
            problem = (
                f"{len(never)} of the adapter's {metrics['adapter_tensors']:.0f} matrices had no gradient in any of "
                f"{updates} updates:\n{first_few(never)}"
            )
            if self._stop:
                raise MegarlError(f"{problem}\ntrain.require_gradients=false goes on without them")
            self._recorder.screen.say(problem, style="bold yellow")
