# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for adapters."""
