# SPDX-License-Identifier: Apache-2.0
"""Turn completions into rewards: the user's functions in processes of their own, limits, penalties, advantages."""
