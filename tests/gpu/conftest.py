# SPDX-License-Identifier: Apache-2.0
"""On GPUs what is refused until it is shown there can be shown."""

import pytest

from megarl.config import checks


@pytest.fixture(autouse=True)
def nothing_is_refused_as_unproven(monkeypatch):
    monkeypatch.setattr(checks, "check_backend", lambda *given: None)
    monkeypatch.setattr(checks, "check_graphs", lambda *given: None)
