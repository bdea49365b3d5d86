# SPDX-License-Identifier: Apache-2.0
"""Tell whether Triton kernels can be compiled here."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None
