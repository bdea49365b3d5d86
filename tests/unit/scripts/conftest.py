# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of scripts."""

from tests.helpers.traced import port, traced

__all__ = ["port", "traced"]
