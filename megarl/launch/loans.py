# SPDX-License-Identifier: Apache-2.0
"""Ask trainer ranks for what they lend to the engines on their GPUs (``sampler.share_base``)."""

import threading
from collections.abc import Callable

from megarl.checkpoint_engine.loan import joined
from megarl.errors import WorkerError
from megarl.launch.placement.plan import Plan


class Loans:
    """The loans of the present trainer ranks. Any thread may ask for one.

    Args:
        plan: the placement: an engine gets the loans of the ranks in its bundles.
        ask: asks a rank for a loan. Each is good for one engine's start: CUDA counts who opens a handle.
        wanted: ``sampler.share_base``; without it an engine gets none.
        seconds: ``train.build_seconds``, the limit on waiting for ranks.
    """

    def __init__(self, plan: Plan, ask: Callable[[int], bytes], *, wanted: bool, seconds: float) -> None:
        self.wanted, self._ask, self._seconds = wanted, ask, seconds
        bundles = [[bundle, *plan.beside(index)] for index, bundle in enumerate(plan.engine)] if wanted else []
        self._ranks = [[plan.trainer.index(bundle) for bundle in own] for own in bundles]
        self._there = threading.Event()

    def allow(self) -> None:
        """Let engines start: the ranks have built their models."""
        self._there.set()

    def withdraw(self) -> None:
        """Let engines wait for the next ranks."""
        self._there.clear()

    def of(self, engine: int) -> list[bytes]:
        """Return the arguments of an engine's ``start``; wait for the ranks if they are being started.

        Raises:
            WorkerError: they did not come within ``train.build_seconds``, or one failed.
        """
        if not self.wanted:
            return []
        if not self._there.wait(self._seconds):
            raise WorkerError(
                f"sampler {engine} waited for the trainer, whose base it shares, longer than train.build_seconds "
                f"({self._seconds:g} s)"
            )
        return [joined([self._ask(rank) for rank in self._ranks[engine]])]
