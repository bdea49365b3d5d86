# SPDX-License-Identifier: Apache-2.0
"""Test the supported releases of megatron-core, and that an unsupported one is named before it is imported."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megarl.errors import UnsupportedError
from megarl.parallel import mcore


def test_the_release_is_the_one_that_would_be_imported():
    import megatron.core

    assert mcore.release() == megatron.core.__shortversion__
    assert mcore.release() in mcore.TESTED


@pytest.mark.parametrize("version", mcore.TESTED)
def test_a_tested_release_is_taken_without_a_word(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mcore.check_release(version)


@pytest.mark.parametrize("version", ["0.17.0", "0.18.10", "0.19.0"])
def test_one_between_them_is_taken_with_a_warning_that_names_it(version):
    with pytest.warns(UserWarning, match=rf"megatron-core {version} is not one that .*0\.16\.1, .*, 0\.19\.2"):
        mcore.check_release(version)


@pytest.mark.parametrize("version", ["0.9.0", "0.16.0", "0.19.10", "0.20.0", "1.0.0"])
def test_one_outside_is_refused_unless_the_user_says_so(version, monkeypatch):
    monkeypatch.delenv(mcore.ALLOW_UNTESTED, raising=False)
    with pytest.raises(
        UnsupportedError, match=rf"megatron-core {version} is installed; tested are .*{mcore.ALLOW_UNTESTED}=1"
    ):
        mcore.check_release(version)
    monkeypatch.setenv(mcore.ALLOW_UNTESTED, "1")
    with pytest.warns(UserWarning, match=f"megatron-core {version}"):
        mcore.check_release(version)


@pytest.mark.parametrize(
    "command",
    [["-c", "from megarl.lora import apply_lora"], ["-m", "megarl.cli.main", "verify", "MODEL"]],
    ids=["plugin", "cli"],
)
def test_an_unknown_release_is_named_before_it_is_imported(tmp_path, command):
    """The planted package has no module that megarl could import."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ''\n")
    (tmp_path / "config.json").write_text("{}")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, *[str(tmp_path) if word == "MODEL" else word for word in command]],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "megatron-core 0.20.0 is installed" in run.stderr.splitlines()[-1]
