# SPDX-License-Identifier: Apache-2.0
"""Check that `train.resume=auto` continues the unfinished run of the same settings, and no other."""

import os
from pathlib import Path

import pytest

from megarl.config import RunConfig, dump_config, parse_config
from megarl.launch.requeue import find_run
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", tied=True)


def settings(model: Path, output: Path, **train: object) -> RunConfig:
    return parse_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "arithmetic"},
            "sampler": {"max_prompt_tokens": 32, "max_response_tokens": 32},
            "train": {"output": str(output), "resume": "auto", **train},
        }
    )


def leave_run(config: RunConfig, name: str, *, age: float = 0, steps: int = 1, finished: bool = False) -> Path:
    """Make the files that a run of ``config`` leaves if it ended after ``steps`` checkpoints, ``age`` seconds ago."""
    folder = Path(config.train.output) / name
    (folder / "checkpoints").mkdir(parents=True)
    train = config.train.model_copy(update={"resume": None})
    (folder / "config.yaml").write_text(dump_config(config.model_copy(update={"train": train})))
    for step in range(1, steps + 1):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text("{}")
        os.utime(checkpoint, (1e9 - age, 1e9 - age))
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def test_the_newest_unfinished_run_of_these_settings_is_continued(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path)
    leave_run(config, "arithmetic-1", age=30)
    wanted = leave_run(config, "arithmetic-2", age=20)
    leave_run(config, "arithmetic-3", age=10, finished=True)
    leave_run(config, "arithmetic-4", age=5, steps=0)
    leave_run(settings(model, tmp_path, seed=9), "arithmetic-5")
    (tmp_path / "arithmetic-6").mkdir()
    (leave_run(config, "arithmetic-7") / "config.yaml").write_text("model: [")
    assert find_run(config).train.resume == str(wanted)


def test_without_one_a_new_run_is_started(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path / "runs")
    assert find_run(config).train.resume is None
    leave_run(config, "arithmetic-1", finished=True)
    assert find_run(config).train.resume is None


def test_another_value_of_resume_is_left_alone(model: Path, tmp_path: Path) -> None:
    for value in (None, "/somewhere/auto"):
        config = settings(model, tmp_path, resume=value)
        assert find_run(config) == config
