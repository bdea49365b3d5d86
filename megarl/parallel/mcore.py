# SPDX-License-Identifier: Apache-2.0
"""The releases of megatron-core: which are supported, and all that megarl has to know of their differences.

Differences are found by looking for the feature, not by comparing versions. megatron is imported inside the functions,
so that the check comes before whatever an unknown release has moved.
"""

import contextlib
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megarl.errors import UnsupportedError

# The gate runs the first and the last of them; `megarl verify --matrix` passed on each.
TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Goes on with another release, with a warning.
ANYWAY = "MEGARL_UNTESTED_MCORE"


class UnsupportedRelease(UnsupportedError, ImportError):
    """The megatron-core that would be imported is not one that megarl was tested with."""


def release() -> str | None:
    """The release that ``import megatron.core`` would find, such as ``"0.19.2"``, without importing it; or None."""
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        info = Path(place) / "core" / "package_info.py"
        if info.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(), flags=re.MULTILINE))
            return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    return None


def check_release(found: str | None = None) -> None:
    """Refuse releases outside of those tested, warn of those between them.

    megarl reads and sets what mcore does not promise to keep, so another release may compute something else without an
    error.

    Args:
        found: default: the one that would be imported.

    Raises:
        UnsupportedRelease: older than the first or newer than the last, and MEGARL_UNTESTED_MCORE is not 1.
    """
    found = found or release()
    if found is None or found in TESTED:
        return
    tested = f"tested are {', '.join(TESTED)}"
    between = _numbers(TESTED[0]) < _numbers(found) < _numbers(TESTED[-1])
    if not between and os.environ.get(ANYWAY) != "1":
        raise UnsupportedRelease(
            f"megatron-core {found} is installed; {tested}. Install one of them, or set {ANYWAY}=1 to go on and see "
            "with `megarl verify` whether it is exact"
        )
    warnings.warn(
        f"megatron-core {found} is not one that megarl was tested with; {tested}; `megarl verify` tells whether it is "
        "exact here",
        stacklevel=2,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def mlp_spec(kind: type, submodules: Any) -> Any:
    """How a ``TransformerLayerSubmodules`` names an ``MLP``.

    From 0.18 on a layer passes its process groups and its name to what it is given; ``MLP`` itself takes neither.

    Args:
        kind: ``MLP`` or a class derived from it.
        submodules: ``MLPSubmodules``.
    """
    from megatron.core.transformer import ModuleSpec

    build = getattr(kind, "as_mlp_submodule", None)
    return partial(build, submodules=submodules) if build else ModuleSpec(module=kind, submodules=submodules)


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """The gradients of one of mcore's optimizers, each counted on one rank; renamed in 0.19."""
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    [get] = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    return get()


# Logger below ``megatron.core`` -> how remarks begin that every model of megarl's would cause on every rank.
_REMARKS = {
    # 0.19: ``HybridModel`` is where new features go. megarl needs none of them.
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Up to 0.17: of an ``MLP`` that is not mcore's own class; what it is built with is the same.
    "transformer.transformer_layer": "Unknown MLP type",
}


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Build a model without mcore's remarks on its classes."""
    with contextlib.ExitStack() as stack:
        for name, start in _REMARKS.items():
            logger = logging.getLogger(f"megatron.core.{name}")
            keep = partial(_is_other, start)
            logger.addFilter(keep)
            stack.callback(logger.removeFilter, keep)
        yield


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
