# SPDX-License-Identifier: Apache-2.0
"""Check megatron-core's release, and hide the differences between supported releases.

Each difference is found by looking for the feature, not by comparing versions. megatron is imported inside the
functions, so that the release is checked before an import can fail on something that moved.
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

# The gate runs the first and the last; `megarl verify --matrix` passed on each.
TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Environment variable: "1" allows any other release, with a warning.
ALLOW_UNTESTED = "MEGARL_UNTESTED_MCORE"


class UnsupportedRelease(UnsupportedError, ImportError):
    """The installed megatron-core is not one that megarl was tested with."""


def release() -> str | None:
    """Return the release that ``import megatron.core`` would load (``"0.19.2"``), without importing it; or None."""
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        info = Path(place) / "core" / "package_info.py"
        if info.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(), flags=re.MULTILINE))
            return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    return None


def check_release(version: str | None = None) -> None:
    """Refuse releases outside the tested range; warn about untested releases within it.

    megarl reads and sets internals that mcore may change, so another release may compute something else without an
    error.

    Args:
        version: the release; default: the one that would be imported.

    Raises:
        UnsupportedRelease: it is older than the first or newer than the last tested one, and MEGARL_UNTESTED_MCORE is
            not 1.
    """
    version = version or release()
    if version is None or version in TESTED:
        return
    tested = f"tested are {', '.join(TESTED)}"
    between = _numbers(TESTED[0]) < _numbers(version) < _numbers(TESTED[-1])
    if not between and os.environ.get(ALLOW_UNTESTED) != "1":
        raise UnsupportedRelease(
            f"megatron-core {version} is installed; {tested}. Install one of them, or set {ALLOW_UNTESTED}=1 to "
            "go on, and see with `megarl verify` whether it is exact"
        )
    warnings.warn(
        f"megatron-core {version} is not one that megarl was tested with; {tested}; `megarl verify` tells whether it "
        "is exact here",
        stacklevel=2,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def mlp_spec(kind: type, submodules: Any) -> Any:
    """Return an ``MLP`` in the form that ``TransformerLayerSubmodules`` expects.

    From 0.18 on a layer passes process groups and a name to the builder it is given; ``MLP`` itself accepts neither.

    Args:
        kind: ``MLP`` or a class derived from it.
        submodules: ``MLPSubmodules``.
    """
    from megatron.core.transformer import ModuleSpec

    build = getattr(kind, "as_mlp_submodule", None)
    return partial(build, submodules=submodules) if build else ModuleSpec(module=kind, submodules=submodules)


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Return the gradients of one of mcore's optimizers, each counted on one rank. mcore renamed the method in 0.19."""
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    [get] = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
    return get()


def finalize_gradients(chunks: list[Any]) -> None:
    """Call mcore's ``finalize_model_grads`` without its walk over all modules, a quarter of a second at 50,000 of them.

    The walk resets what routers count for their balancing. megarl's routers count nothing (families/moe.py).
    """
    from megatron.core.distributed import finalize_model_grads

    scope = finalize_model_grads.__globals__
    name = "reset_model_temporary_tensors"
    walk, scope[name] = scope[name], lambda config, model: None
    try:
        finalize_model_grads(chunks, None)
    finally:
        scope[name] = walk


# Logger below ``megatron.core`` -> start of the messages that every model of megarl would log on every rank.
_WARNINGS = {
    # 0.19 recommends ``HybridModel`` for new features. megarl needs none of them.
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Up to 0.17, for an ``MLP`` subclass; it is built with the same arguments.
    "transformer.transformer_layer": "Unknown MLP type",
}


@contextlib.contextmanager
def without_class_warnings() -> Iterator[None]:
    """Suppress mcore's log messages about the classes of a model while it is built."""
    with contextlib.ExitStack() as stack:
        for name, start in _WARNINGS.items():
            logger = logging.getLogger(f"megatron.core.{name}")
            keep = partial(_is_other, start)
            logger.addFilter(keep)
            stack.callback(logger.removeFilter, keep)
        yield


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
