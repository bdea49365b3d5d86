# SPDX-License-Identifier: Apache-2.0
"""Write matrices into vLLM's tensors and read them back, on a GPU or a CPU."""
