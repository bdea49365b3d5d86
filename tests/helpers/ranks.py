# SPDX-License-Identifier: Apache-2.0
"""``run_ranks`` for functions that live in test files."""

from megarl.verify import launch

# Imported once by the fork server, instead of by every rank.
launch.PRELOAD.append("pytest")
run_ranks = launch.run_ranks
