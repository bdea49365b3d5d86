# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that start a Ray."""

from tests.helpers.traced import traced

__all__ = ["traced"]
