# SPDX-License-Identifier: Apache-2.0
"""Launch Triton kernels with less of the host's time.

Triton looks at every argument of every launch anew, which takes the host 15 to 20 microseconds for a kernel of twenty
arguments: longer than many kernels take the GPU. Here a kernel that was compiled for the same numbers, dtypes and
constants is launched again as it is, with addresses instead of tensors. A layer launches 23 kernels in a step.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch

# Launches that a kernel remembers; their number grows with that of different sizes. They are forgotten together.
MOST = 4096
# Bytes. Triton compiles a kernel of its own for tensors that do not begin at a multiple of it.
ALIGNED = 16


class QuickKernel:
    """A kernel as ``triton.jit`` returns it, launched likewise: ``kernel[grid](*arguments, **constants)``.

    Its constants follow its other arguments and are given by name, with ``num_warps`` and the like.

    Attributes:
        kernel: what ``triton.jit`` returned.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names = list(signature(kernel.fn).parameters)
        self._known: dict[tuple, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return the function that launches ``grid`` programs."""
        return lambda *arguments, **settings: self._launch(grid, arguments, settings)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        given: list[Any] = []
        key: list[Any] = [arguments[0].get_device()]
        addresses = _read(arguments, given, key)
        if addresses % ALIGNED:
            self.kernel[grid](*arguments, **settings)
            return
        place = (*key, *settings.items())
        known = self._known.get(place)
        if known is not None:
            compiled, constants = known
            compiled[(*grid, 1, 1)[:3]](*given, *constants)
            return
        compiled = self.kernel[grid](*arguments, **settings)
        # Triton's interpreter compiles nothing.
        if compiled is not None and MOST:
            self._remember(place, compiled, [settings[name] for name in self._names[len(arguments) :]])

    def _remember(self, place: tuple, compiled: Any, constants: list[Any]) -> None:
        assert not any(isinstance(constant, torch.Tensor) for constant in constants), "tensors are not given by name"
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[place] = compiled, constants


def _read(arguments: Sequence[Any], given: list[Any], key: list[Any]) -> int:
    """Add to ``given`` what a compiled kernel takes, and to ``key`` what it depends on; return all addresses' bits."""
    bits = 0
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            address = argument.data_ptr()
            bits |= address
            given.append(address)
            key.append(argument.dtype)
        elif type(argument) is tuple:
            inner: list[Any] = []
            bits |= _read(argument, inner, key)
            given.append(tuple(inner))
        else:
            given.append(argument)
            key.append(argument)
    return bits
