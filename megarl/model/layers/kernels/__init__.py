"""Triton kernels of the model; imported only where they run."""
