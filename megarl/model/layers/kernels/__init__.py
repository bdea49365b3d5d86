# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the model. Import them only where they run: on CUDA, with Triton installed."""
