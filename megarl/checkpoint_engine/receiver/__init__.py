# SPDX-License-Identifier: Apache-2.0
"""Receive weights inside vLLM's workers. All that touches vLLM's insides is here."""
