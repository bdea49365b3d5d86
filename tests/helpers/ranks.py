# SPDX-License-Identifier: Apache-2.0
"""Make ``run_ranks`` work with functions of test files."""

from megarl.verify import launch

# The fork server imports it once, instead of every rank.
launch.PRELOAD.append("pytest")
run_ranks = launch.run_ranks
