"""Triton kernels of the losses."""
