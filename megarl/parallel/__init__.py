# SPDX-License-Identifier: Apache-2.0
"""Ranks, process groups and devices. The only package that reads mcore's ``parallel_state``."""
