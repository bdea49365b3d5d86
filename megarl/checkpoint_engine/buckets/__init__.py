# SPDX-License-Identifier: Apache-2.0
"""Buckets, which both ends share: planned once per model, filled, digested, and passed in order."""
