# SPDX-License-Identifier: Apache-2.0
"""Name the first module, gradient or tensor that differs."""
