# SPDX-License-Identifier: Apache-2.0
"""Run one node of a run over several: its settings, its part of the Ray cluster, and its end."""
