# SPDX-License-Identifier: Apache-2.0
"""The operations of ``model.numerics: bitwise``, which trainer and sampler share (docs/bitwise.md)."""
