# SPDX-License-Identifier: Apache-2.0
"""Check what sampler.reproducible refuses."""

import pytest

from megarl.config import parse_config
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("sampler", "train", "named"),
    [
        ({"engines": 2}, {}, "sampler.engines 2"),
        ({"stop": ["</answer>"]}, {}, "sampler.stop"),
        ({}, {"max_staleness": 1}, "train.max_staleness 1"),
    ],
)
def test_what_depends_on_timing_is_refused(sampler: dict, train: dict, named: str) -> None:
    sections = {"model": {"path": "."}, "task": {"name": "arithmetic"}, "train": train}
    parse_config(sections | {"sampler": sampler})
    with pytest.raises(ConfigError, match=f"sampler.reproducible is true with {named}"):
        parse_config(sections | {"sampler": sampler | {"reproducible": True}})
