# SPDX-License-Identifier: Apache-2.0
"""Compute parts of a layer by operations that torch.compile does not look into: the kernels of ``kernels``."""
