# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the weight path. Import them only where they run: on CUDA, with Triton installed."""
