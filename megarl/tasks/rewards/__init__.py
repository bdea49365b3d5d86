# SPDX-License-Identifier: Apache-2.0
"""Load and call reward functions of the user's own."""
