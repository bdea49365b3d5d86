# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sets of prompts, estimates with confidence intervals, tables. Imports neither torch nor vLLM."""
