# SPDX-License-Identifier: Apache-2.0
"""Base weights: names by family, Hugging Face folders, and the part of each tensor that a rank holds."""
