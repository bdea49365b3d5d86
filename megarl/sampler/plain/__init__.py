# SPDX-License-Identifier: Apache-2.0
"""Measure vLLM without anything of megarl, to compare with."""
