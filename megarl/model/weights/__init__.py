# SPDX-License-Identifier: Apache-2.0
"""Base weights: names by family, Hugging Face folders, and what each rank holds of a tensor."""
