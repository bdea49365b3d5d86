# SPDX-License-Identifier: Apache-2.0
"""The layers of ``model.numerics: bitwise``, on the kernels of ``megarl.bitwise`` that the sampler uses too."""
