# SPDX-License-Identifier: Apache-2.0
"""Measure training steps: `megarl bench train`."""
