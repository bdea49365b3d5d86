# SPDX-License-Identifier: Apache-2.0
"""Python runs this at the start of a process that inherits this folder in PYTHONPATH (megarl/torch_addons.py)."""

import megarl  # noqa: F401  (hides what torch cannot load)
