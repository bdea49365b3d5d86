# SPDX-License-Identifier: Apache-2.0
"""Remember which matrices of an adapter had a gradient."""

from collections.abc import Sequence

import torch


class GradientRecord:
    """Holds which matrices had a gradient other than 0, in the last update and in all. An update without any is none.

    Args:
        names: PEFT's names of the matrices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.updates = 0
        self._last: torch.Tensor | None = None
        self._ever: torch.Tensor | None = None

    def add(self, norms: torch.Tensor) -> None:
        """Take an update's gradient norms, or other marks that are 0 without a gradient: one per name."""
        self._last = norms != 0
        self._ever = self._last if self._ever is None else self._ever | self._last
        self.updates += 1

    def without_gradient(self) -> list[str]:
        """Return the names of the matrices whose gradient was 0 in the last update."""
        return self._names(self._last)

    def never(self) -> tuple[int, list[str]]:
        """Return the number of updates, and the names of the matrices whose gradient was 0 in all of them."""
        return self.updates, self._names(self._ever)

    def _names(self, marks: torch.Tensor | None) -> list[str]:
        found = [] if marks is None else marks.tolist()
        return [name for name, mark in zip(self.names, found, strict=False) if not mark]
