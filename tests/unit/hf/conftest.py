# SPDX-License-Identifier: Apache-2.0
"""Leave no process group behind."""

from collections.abc import Iterator

import pytest

from megarl.parallel.groups import destroy_groups


@pytest.fixture(autouse=True)
def groups_end() -> Iterator[None]:
    yield
    destroy_groups()
