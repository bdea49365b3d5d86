# SPDX-License-Identifier: Apache-2.0
"""The lanes of GPUs that `tests.gpu.prove` can run name stages that exist, each GPU once."""

import itertools
import tarfile
from pathlib import Path

import pytest

from tests.gpu.prove import LARGEST, archive, command_of, lanes_of

LANES = Path(__file__).parents[2] / "gpu" / "lanes"
# By the first word of a file's name.
GPUS = {"one": 1, "two": 2, "four": 4, "eight": 8}


@pytest.mark.parametrize("file", sorted(LANES.glob("*.txt")), ids=lambda file: file.name)
def test_every_stage_is_known_and_no_gpu_is_in_two_lanes(file: Path, tmp_path: Path) -> None:
    lanes = [[stage for group in lane for stage in group.split("+")] for lane in lanes_of((f"@{file}",))]
    used = [{gpu for stage in lane for gpu in stage.partition("@")[0].split(",")} for lane in lanes]
    assert sorted(itertools.chain(*used)) == [str(gpu) for gpu in range(GPUS[file.stem.partition("-")[0]])]
    for stage in itertools.chain(*lanes):
        command, shown = command_of(stage, tmp_path)
        assert command and shown


def test_an_unknown_stage_is_refused_before_anything_runs(tmp_path: Path) -> None:
    lanes = tmp_path / "lanes.txt"
    lanes.write_text("# a comment\n\n0,1: weights+smoke nothing:qwen3-8b\n")
    [lane] = lanes_of((f"@{lanes}",))
    assert lane == ["0,1@weights+0,1@smoke", "0,1@nothing:qwen3-8b"]
    with pytest.raises(SystemExit, match="unknown stage '0,1@nothing:qwen3-8b'"):
        command_of(lane[1], tmp_path)


def test_logs_and_tables_are_stored_without_what_is_large(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name, size in {"a.log": 3, "run/b.md": 4, "run/checkpoints/c": 5, "run/d.json": LARGEST}.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(bytes(size))
    (work / "gone.log").symlink_to(work / "nowhere")
    archive(work, tmp_path)
    with tarfile.open(tmp_path / "logs.tar.gz") as file:
        assert sorted(file.getnames()) == ["logs/a.log", "logs/run/b.md"]
