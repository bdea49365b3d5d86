"""Triton kernels of the losses."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
