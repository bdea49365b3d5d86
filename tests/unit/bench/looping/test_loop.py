# SPDX-License-Identifier: Apache-2.0
"""Test `megarl bench loop` around its runs, which a stand-in replaces. A real one: tests/e2e/test_bench_loop.py."""

import json
import sys
from pathlib import Path

import pytest

from megarl.bench.looping import loop
from megarl.bench.looping.settings import parse_loop_settings
from megarl.cli.main import main
from megarl.config import load_config
from megarl.errors import ConfigError, WorkerError

# Writes what a run leaves. Its steps take 100 s, and those that count sample for 3 s and train for 2 s.
RUN = """
import json, sys
from pathlib import Path
from megarl.config import load_config

config = load_config(sys.argv[1], sys.argv[2:])
folder, side = Path(config.train.output) / "arithmetic-20260101-000000", config.train.max_staleness > 0
(folder / "logs").mkdir(parents=True)
(folder / "logs" / "sampler-0.log").write_text("started")
(folder / "rollouts").mkdir()
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(config.train.steps + 1):
        counts = 0 < step - (config.train.steps - config.train.max_staleness - 2) <= 2
        row = {"step": step, "seconds": (3.3 if side else 5.5) if counts else 100.0, "reward_mean": 0.5}
        if step:
            row |= {"seconds/sample": 1.0 if side else 3.0, "seconds/train": 2.0, "seconds/sync": 0.25}
            row |= {"sampled_tokens": 110.0, "mismatch_max": 1e-3 * step, "sync/flip": 0.125, "sync_bytes": 64.0}
        file.write(json.dumps(row) + "\\n")
(folder / "summary.json").write_text(json.dumps({"start_seconds": 20.0 if side else 50.0}))
print("the log of a run")
raise SystemExit(STATUS)
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stand_in(status: int) -> None:
        program = tmp_path / "run.py"
        program.write_text(RUN.replace("STATUS", str(status)))
        monkeypatch.setattr(loop, "TRAIN", [sys.executable, str(program)])

    stand_in(0)
    return stand_in


def test_only_the_steps_after_the_warm_up_count_in_each_way(runs, tmp_path: Path) -> None:
    settings, overrides = parse_loop_settings("tiny", ["parallel.data=2", "steps=2", "warmup=1", "staleness=3"])
    said: list[str] = []
    report = loop.bench_loop(settings, tmp_path / "out", overrides, report=said.append)
    turns, side = report["ways"]["turns"], report["ways"]["side"]
    assert (turns["step_seconds"], side["step_seconds"]) == (5.5, 3.3)
    assert turns["phase_seconds"] == {"sample": 3.0, "train": 2.0, "sync": 0.25, "canary": 0.0}
    assert (turns["tokens_per_second"], turns["start_seconds"], side["start_seconds"]) == (20.0, 50.0, 20.0)
    # Side by side, what was sampled before the first update is used up first, and at the end nothing is sampled.
    assert (len(turns["steps"]), len(side["steps"])) == (1 + 2, 1 + 3 + 1 + 2 + 3)
    assert (turns["mismatch_max"], turns["sync"]) == (3e-3, {"sync/flip": 0.125, "sync_bytes": 64.0})
    assert all("reward_mean" not in row for row in turns["steps"])
    configs = {way: load_config(tmp_path / "out" / f"loop-{way}.yaml", overrides) for way in ("turns", "side")}
    assert {way: config.train.max_staleness for way, config in configs.items()} == {"turns": 0, "side": 3}
    assert all(config.parallel.data == 2 for config in configs.values())
    kept = tmp_path / "out" / "loop-side"
    assert (kept / "logs" / "sampler-0.log").read_text() == "started" and not (kept / "rollouts").exists()
    assert (tmp_path / "out" / "loop-side.log").read_text() == "the log of a run\n"
    assert said[0] == "the weights are written"


def test_the_table_compares_a_step_side_by_side_with_the_longer_phase(runs, tmp_path: Path, capsys) -> None:
    assert main(["bench", "loop", "tiny", "steps=2", "--out", str(tmp_path)]) == 0
    *table, report = capsys.readouterr().out.strip().splitlines()
    assert table[0].startswith("tiny: 2 prompts x 4 completions of at most 8 tokens a step, r=4, bfloat16; seconds")
    assert [line.split() for line in table[2:5]] == [
        ["start-up", "step", "sample", "train", "sync", "canary", "tokens/s", "worst", "mismatch"],
        ["in", "turns", "50.0", "5.500", "3.000", "2.000", "0.250", "0.000", "20", "3.0e-03"],
        ["side", "by", "side", "20.0", "3.300", "1.000", "2.000", "0.250", "0.000", "33", "6.0e-03"],
    ]
    assert table[-1] == "a step side by side takes 1.10 of the longer phase in turns"
    assert json.loads(report)["ways"]["side"]["step_seconds"] == 3.3


def test_one_way_alone_is_not_compared(runs, tmp_path: Path, capsys) -> None:
    assert main(["bench", "loop", "tiny", "ways=[turns]", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "longer phase" not in out and "side by side" not in out


def test_a_failed_run_is_an_error_with_the_end_of_its_log(runs, tmp_path: Path) -> None:
    runs(3)
    settings, _ = parse_loop_settings("tiny")
    with pytest.raises(WorkerError, match=r"'turns' ended with status 3; its log: .*loop-turns.log\nthe log of a run"):
        loop.bench_loop(settings, tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "unknown key 'stepz'; did you mean 'steps'"),
        ("train.steps=3", "bench loop sets train.steps itself; use steps and warmup"),
        ("staleness=0", "staleness"),
    ],
)
def test_wrong_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_loop_settings("tiny", [override])


def test_a_wrong_setting_of_the_recipe_is_refused_before_weights_are_written(runs, tmp_path: Path) -> None:
    settings, overrides = parse_loop_settings("tiny", ["train.prompts_per_stepp=3"])
    said: list[str] = []
    with pytest.raises(ConfigError, match="did you mean 'prompts_per_step'"):
        loop.bench_loop(settings, tmp_path, overrides, report=said.append)
    assert not said


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_of_the_users_is_not_replaced_by_the_link_to_the_model(runs, tmp_path: Path, kind: str) -> None:
    settings, overrides = parse_loop_settings("tiny", ["steps=1"])
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    loop.bench_loop(settings, out, overrides)
    loop.bench_loop(settings, out, overrides)
    assert (out / "model").is_dir() and (out / loop.LINK).is_symlink()
    (out / loop.LINK).unlink()
    (out / loop.LINK).mkdir() if kind == "folder" else (out / loop.LINK).write_text("mine")
    with pytest.raises(ConfigError, match=f"{loop.LINK}' is not a link of this bench"):
        loop.bench_loop(settings, out, overrides)


def test_an_out_that_is_no_folder_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "out").write_text("")
    assert main(["bench", "loop", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert f"--out is '{tmp_path / 'out'}', where no folder can be made: File exists" in capsys.readouterr().err
