# SPDX-License-Identifier: Apache-2.0
"""All that a run shows and leaves: rows, screen, plot, summary, checkpoints, and what a resume needs of them."""
