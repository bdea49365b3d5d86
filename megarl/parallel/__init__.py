# SPDX-License-Identifier: Apache-2.0
"""Ranks, process groups and devices. Only this package reads mcore's ``parallel_state``."""
