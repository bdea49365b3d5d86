# SPDX-License-Identifier: Apache-2.0
"""Run inside vLLM's workers: what megarl adds to them. Nothing else of megarl imports it."""
