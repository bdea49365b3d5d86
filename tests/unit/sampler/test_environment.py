# SPDX-License-Identifier: Apache-2.0
"""Test the variables of a process that holds an engine."""

import os

import pytest

from megarl.sampler import prepare_environment


@pytest.mark.parametrize(
    ("given", "folder"),
    [({}, "/home/her/.triton/cache"), ({"TRITON_HOME": "/t"}, "/t/.triton/cache"), ({"TRITON_CACHE_DIR": "/c"}, "/c")],
)
def test_kernels_are_kept_where_the_next_start_finds_them(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], folder: str
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/home/her", **given})
    monkeypatch.setenv("HOME", "/home/her")
    prepare_environment(threads=1)
    assert os.environ["TRITON_CACHE_DIR"] == folder
