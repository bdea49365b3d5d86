# SPDX-License-Identifier: Apache-2.0
"""Faults of whole runs: `python -m tests.faults`."""
