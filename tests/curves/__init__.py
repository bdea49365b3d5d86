# SPDX-License-Identifier: Apache-2.0
"""Compare learning curves of the quickstart's task by staleness (`python -m tests.curves`)."""
