# SPDX-License-Identifier: Apache-2.0
"""Read the measurements of an update on the host; remember which matrices of an adapter had a gradient."""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch

from megarl.errors import MegarlError


class GradientError(MegarlError, FloatingPointError):
    """The gradient norm is not finite; the adapter was not updated."""


class GradientRecord:
    """Holds which matrices had a gradient other than 0, in the last update and in all. An update without any is none.

    Args:
        names: PEFT's names of the matrices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.updates = 0
        self._last: np.ndarray = np.ones(len(self.names), dtype=bool)
        self._ever = self._last

    def take(self, measured: torch.Tensor) -> dict[str, float]:
        """Take an update's measurements. The host waits for the device, once.

        Args:
            measured: ``[1 + names]``: the gradient's global norm before clipping; then a number for each name, 0 where
                there is no gradient.

        Returns:
            ``grad_norm``; ``grad_tensors``: number of the matrices with a gradient other than 0; ``adapter_tensors``:
            number of all matrices.

        Raises:
            GradientError: the norm is not finite; the caller has not updated anything then.
        """
        values = measured.cpu().numpy()
        norm, marks = float(values[0]), values[1:] != 0
        if not math.isfinite(norm):
            raise GradientError(f"the gradient norm is {norm}; the adapter was not updated")
        if norm:
            self._last = marks
            self._ever = self._ever | marks if self.updates else marks
            self.updates += 1
        return {"grad_norm": norm, "grad_tensors": float(marks.sum()), "adapter_tensors": float(len(self.names))}

    def without_gradient(self) -> list[str]:
        """Return the names of the matrices whose gradient was 0 in the last update; none before the first."""
        return self._names(self._last)

    def never(self) -> tuple[int, list[str]]:
        """Return the number of updates, and the names of the matrices whose gradient was 0 in all of them.

        An expert's matrix is left out if another expert's in the same place had a gradient: an expert that no token is
        routed to has none. Some expert of each layer gets every token.
        """
        reached = {_place(name) for name, mark in zip(self.names, self._ever, strict=True) if mark}
        return self.updates, [name for name in self._names(self._ever) if _place(name) not in reached]

    def _names(self, marks: np.ndarray) -> list[str]:
        return [name for name, mark in zip(self.names, marks, strict=True) if not mark]


def _place(name: str) -> str:
    """Return a matrix's name without the number of its expert."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)
