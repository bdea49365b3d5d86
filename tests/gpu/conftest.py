# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the GPU tests: settings that are otherwise refused until GPUs have shown them can be tested here."""

import pytest

from megarl.config import back_ends, checks


@pytest.fixture(autouse=True)
def nothing_is_refused_as_unproven(monkeypatch):
    monkeypatch.setattr(back_ends, "check_te", lambda *given: None)
    monkeypatch.setattr(checks, "check_graphs", lambda *given: None)
