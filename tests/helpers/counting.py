# SPDX-License-Identifier: Apache-2.0
"""Count the calls of functions."""

from types import ModuleType


def count_calls(functions: dict[str, tuple[ModuleType, str]]) -> dict[str, int]:
    """Replace functions of modules by ones that also count their calls.

    Args:
        functions: name of the count -> module and name of the function.

    Returns:
        The counts, which go on.
    """
    counts = dict.fromkeys(functions, 0)

    def replace(name: str, module: ModuleType, attribute: str) -> None:
        function = getattr(module, attribute)

        def call(*given: object) -> object:
            counts[name] += 1
            return function(*given)

        setattr(module, attribute, call)

    for name, place in functions.items():
        replace(name, *place)
    return counts
