# SPDX-License-Identifier: Apache-2.0
"""Launch Triton kernels with less of the host's time.

Triton looks at every argument of every launch anew, which takes the host 15 to 20 microseconds for a kernel of twenty
arguments: longer than many kernels take the GPU. Here a kernel that was compiled for the same numbers, dtypes and
constants is launched again as it is, with addresses instead of tensors. A layer launches 23 kernels in a step.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from triton.knobs import runtime
from triton.runtime import driver

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
        self._known: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return the function that launches ``grid`` programs."""

        def launch(*arguments: Any, **settings: Any) -> None:
            """Launch the kernel with these arguments, and with its constants and Triton's settings by name."""
            given: list[Any] = []
            key: list[Any] = [grid, device := arguments[0].get_device(), *settings, *settings.values()]
            addresses = _read(arguments, given, key)
            known = self._known.get(place := tuple(key))
            if known is None or addresses % ALIGNED:
                self._prepare(place, arguments, settings, addresses)
                return
            run, x, y, z, stream_of, function, packed, constants, compiled = known
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                compiled[x, y, z](*given, *constants)
            else:
                run(x, y, z, stream_of(device), function, packed, None, None, None, *given, *constants)

        return launch

    def _prepare(self, place: tuple, arguments: Sequence[Any], settings: dict[str, Any], addresses: int) -> None:
        """Launch as Triton does, and remember the compiled kernel for ``place`` if that fits all aligned tensors."""
        grid = place[0]
        compiled = self.kernel[grid](*arguments, **settings)
        # Triton's interpreter compiles nothing.
        if compiled is None or addresses % ALIGNED or not MOST:
            return
        constants = [settings[name] for name in self._names[len(arguments) :]]
        assert not any(isinstance(constant, Tensor) for constant in constants), "tensors are not given by name"
        if len(self._known) >= MOST:
            self._known.clear()
        # What a launch takes, in the order of ``triton.compiler.CompiledKernel``; nobody asks for its metadata.
        self._known[place] = (
            compiled.run, *(*grid, 1, 1)[:3], driver.active.get_current_stream, compiled.function,
            compiled.packed_metadata, constants, compiled,
        )  # fmt: skip


def _read(arguments: Sequence[Any], given: list[Any], key: list[Any]) -> int:
    """Add to ``given`` what a compiled kernel takes, and to ``key`` what it depends on; return all addresses' bits."""
    bits = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            bits |= (address := argument.data_ptr())
            given.append(address)
            key.append(argument.dtype)
        elif type(argument) is not tuple:
            given.append(argument)
            key.append(argument)
        else:
            inner: list[Any] = []
            bits |= _read(argument, inner, key)
            given.append(tuple(inner))
    return bits
