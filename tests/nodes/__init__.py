# SPDX-License-Identifier: Apache-2.0
"""Runs over two nodes: `python -m tests.nodes`."""
