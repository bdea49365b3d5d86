# SPDX-License-Identifier: Apache-2.0
"""Bring the adapters and weights of vLLM's mixtures of experts to where its kernels read them."""
