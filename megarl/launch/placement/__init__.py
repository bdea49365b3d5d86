# SPDX-License-Identifier: Apache-2.0
"""Decide on which nodes and GPUs a run's actors go, and hold those places."""
