# SPDX-License-Identifier: Apache-2.0
"""Measure whole runs: `megarl bench loop`."""
