# SPDX-License-Identifier: Apache-2.0
"""Measure weight syncs: `megarl bench sync`."""
