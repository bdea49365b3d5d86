# SPDX-License-Identifier: Apache-2.0
"""Test where a run's folder may be made."""

import pytest

from megarl.config import parse_config
from megarl.errors import ConfigError
from megarl.launch.run import run_folder
from tests.helpers.models import make_model


def test_an_output_path_that_cannot_be_is_refused_by_name(tmp_path):
    tree = {
        "model": {"path": str(make_model(tmp_path / "model", "llama", tied=True))},
        "task": {"name": "arithmetic"},
        "sampler": {"max_prompt_tokens": 32, "max_response_tokens": 32},
    }
    (tmp_path / "file").write_text("")
    for output in ("~nosuchuser", "/proc/runs", "n" * 300, f"{tmp_path}/{'n' * 300}/x", str(tmp_path / "file"), "a\0b"):
        with pytest.raises(ConfigError, match=r"train\.output is "):
            run_folder(parse_config(tree | {"train": {"output": output}}))
    made = [run_folder(parse_config(tree | {"train": {"output": str(tmp_path / "runs")}})) for _ in range(2)]
    own = run_folder(parse_config(tree | {"task": {"name": "/a/b/own.py:Echo"}, "train": {"output": str(tmp_path)}}))
    assert own.parent == tmp_path and own.name.startswith("Echo-")
    assert len(set(made)) == 2 and all(folder.is_dir() for folder in made)
