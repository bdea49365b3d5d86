# SPDX-License-Identifier: Apache-2.0
"""Test a run folder after a resume: the run's own config, and only metrics of weights that exist."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from megarl.config import load_config, parse_config
from megarl.controller.recording.metrics import Recorder
from megarl.controller.recording.resumption import find_last
from megarl.controller.recording.screen import Screen
from megarl.controller.recording.summary import summarise
from megarl.controller.rollouts.rollout import Rollout
from megarl.errors import CheckpointError
from megarl.run_folder import last_checkpoint
from tests.helpers.models import make_model


def make_recorder(folder: Path) -> Recorder:
    """Make the recorder of a run that begins in ``folder / "run"``."""
    model = folder / "model"
    if not model.exists():
        make_model(model, "llama", tied=True)
    config = parse_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "arithmetic"},
            "sampler": {"max_prompt_tokens": 32, "max_response_tokens": 32},
            "train": {"resume": str(folder / "run"), "resume_step": 3, "resume_changes": ["task.options"], "seed": 5},
        }
    )
    (folder / "run").mkdir(exist_ok=True)
    recorder = Recorder(folder / "run", config, Screen(3))
    recorder.hold()
    recorder.begin()
    return recorder


@pytest.fixture
def recorder(tmp_path):
    recorder = make_recorder(tmp_path)
    yield recorder
    recorder.close()


def test_saved_config_is_the_runs_own_however_often_it_was_continued(recorder):
    saved = load_config(recorder.folder / "config.yaml")
    assert (saved.train.resume, saved.train.resume_step, saved.train.resume_changes) == (None, None, [])
    assert saved.train.seed == 5


def test_nothing_is_written_before_everything_has_been_loaded(tmp_path, recorder):
    folder = tmp_path / "other"
    folder.mkdir()
    other = Recorder(folder, recorder.config, recorder.screen)
    other.hold()
    assert [path.name for path in folder.iterdir()] == [".lock"]
    with pytest.raises(CheckpointError, match="other' is in use by process"):
        Recorder(folder, recorder.config, recorder.screen).hold()
    other.close()
    assert [path.name for path in folder.iterdir()] == [".lock"]


def run_step(recorder, step):
    recorder.write_rollout(step, Rollout([], [], [], [], [], []))
    recorder.rollout_written()
    recorder.step({"step": step, "reward": 1.0})


def test_a_session_that_goes_back_writes_its_steps_again(recorder):
    for step in (1, 2, 3):
        run_step(recorder, step)
    recorder.go_back(find_last(recorder.folder, recorder.config, {}))
    assert recorder.rows == [] and (recorder.folder / "metrics.jsonl").read_text() == ""
    run_step(recorder, 1)
    assert [row["step"] for row in recorder.rows] == [1]
    assert len((recorder.folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_completions_of_the_last_steps_are_kept(recorder):
    train = recorder.config.train.model_copy(update={"keep_rollouts": 2})
    assert recorder.config.train.keep_rollouts is None
    for step in (1, 2):
        run_step(recorder, step)
    recorder.config = recorder.config.model_copy(update={"train": train})
    for step in (3, 4):
        run_step(recorder, step)
    files = sorted(path.name for path in (recorder.folder / "rollouts").iterdir())
    assert files == ["step-000003.jsonl", "step-000004.jsonl"]


def test_a_run_whose_folder_is_deleted_ends_by_name_and_makes_no_new_one(recorder):
    run_step(recorder, 1)
    shutil.rmtree(recorder.folder)
    for action in (lambda: run_step(recorder, 2), lambda: recorder.checkpoint(FakeTrainers(), 2, {})):
        with pytest.raises(CheckpointError, match="run' is gone: it was deleted or moved while the run went on"):
            action()
    assert not recorder.folder.exists()


FULL = """
import resource, sys
from tests.unit.controller.test_recorder import make_recorder, run_step
from megarl.errors import CheckpointError
from pathlib import Path
recorder = make_recorder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))  # the disk is full
for step in range(1, 1000):
    try:
        run_step(recorder, step)
    except CheckpointError as error:
        print(f"step {step}: {error}")
        break
recorder.close()
"""


@pytest.mark.parametrize("size", [0, 1501])
def test_a_full_disk_is_named_and_leaves_only_whole_rows(tmp_path, size):
    make_recorder(tmp_path).close()  # writes the model
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), str(size)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = re.search(r"step (\d+): '(.*)' cannot be written: File too large", ran.stdout)
    assert said, ran.stdout
    file = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [row["step"] for row in rows] in ([*range(1, int(said[1]))], [*range(1, int(said[1]) + 1)])


def test_summary_averages_the_ends_and_weighs_speed_by_time():
    rows = [
        {"reward": reward, "mismatch_mean": 0.1, "mismatch_max": peak, "trained_tokens": 10.0, "sampled_tokens": 4.0,
         "groups_without_signal": reward, "seconds/train": seconds,
         "sample_tokens_per_second": rate, "seconds/sync": 0.5}
        for reward, peak, seconds, rate in (
            (0.0, 1.0, 1.0, 2.0), (0.0, 3.0, 1.0, 1.0), (0.3, 1.0, 2.0, 4.0), (0.6, 1.0, 1.0, 4.0)
        )
    ]  # fmt: skip
    summary = summarise(rows)
    assert summary["reward_first"] == pytest.approx(0.1)
    assert summary["reward_last"] == pytest.approx(0.3)
    assert summary["mismatch_max"] == 3.0
    assert summary["groups_without_signal"] == pytest.approx(0.9 / 4)
    assert summary["train_tokens_per_second"] == pytest.approx(40 / 5)
    assert summary["sample_tokens_per_second"] == pytest.approx(16 / (2 + 4 + 1 + 1))


class FakeTrainers:
    """Writes its checkpoints when told to, like rank 0's thread at its own pace."""

    def __init__(self):
        self.saved, self.answer = [], Future()

    def call(self, method, *args):
        if method == "save_checkpoint":
            self.saved.append(Path(args[0]))

    def start_on_rank_zero(self, method):
        assert method == "finish_checkpoint"
        return self.answer

    def write(self, path):  # under another name until it is complete, like megarl.files.publish
        partial = path.with_name(f".{path.name}.partial")
        partial.mkdir()
        (partial / "state.json").write_text("{}")
        partial.rename(path)


def test_checkpoints_beyond_those_kept_go_only_once_newer_ones_are_complete(recorder):
    trainers, folder = FakeTrainers(), recorder.folder / "checkpoints"
    for step in (1, 2, 3, 4):
        if step > 1:
            trainers.write(trainers.saved[-1])  # the previous save is complete when the next one is accepted
        recorder.checkpoint(trainers, step, {})
        complete = [path.name for path in sorted(folder.glob("step-*"))]
        assert complete == [f"step-{n:06d}" for n in range(max(1, step - 2), step)]
    assert [path.name for path in trainers.saved] == [f"step-{n:06d}" for n in (1, 2, 3, 4)]


def test_a_later_checkpoint_of_a_run_that_was_resumed_before_it_makes_room(recorder):
    trainers = FakeTrainers()
    trainers.write(recorder.folder / "checkpoints" / "step-000003")
    recorder.checkpoint(trainers, 3, {})
    assert list((recorder.folder / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupted_run_waits_for_the_checkpoint_that_is_being_written(recorder, busy):
    trainers = FakeTrainers()
    recorder.checkpoint(trainers, 1, {})

    def write():
        time.sleep(0.3)
        trainers.write(trainers.saved[0])
        if not busy:  # otherwise rank 0 is stuck in a collective and never answers
            trainers.answer.set_result(None)

    thread = threading.Thread(target=write)
    thread.start()
    start = time.monotonic()
    recorder.rescue(trainers)
    assert last_checkpoint(recorder.folder) == trainers.saved[0]
    assert time.monotonic() - start < 5
    thread.join()


def test_an_interrupted_run_says_why_its_checkpoint_is_missing(recorder, capsys):
    trainers = FakeTrainers()
    recorder.rescue(trainers)  # nothing is being written, so there is nothing to wait for
    recorder.checkpoint(trainers, 1, {})
    trainers.answer.set_exception(CheckpointError("no space left"))
    recorder.rescue(trainers)
    assert "step-000001' is not complete: no space left" in capsys.readouterr().out


def test_a_run_that_ended_early_names_its_folder_and_how_to_go_on(recorder, capsys):
    recorder.say_how_to_go_on()
    assert f"the run is in {recorder.folder}; it holds no checkpoint yet" in capsys.readouterr().out
    checkpoint = recorder.folder / "checkpoints" / "step-000007"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    recorder.say_how_to_go_on()
    assert f"go on after step 7: megarl resume {recorder.folder}\n" in capsys.readouterr().out


class DoneTrainers:
    """Answers what a run that ends asks of its ranks."""

    @staticmethod
    def call(method, *args):
        return [0.0]


def test_prompts_that_were_left_out_are_said_and_counted_in_the_summary(recorder, capsys, monkeypatch):
    monkeypatch.setattr("megarl.controller.recording.plot.plot_run", lambda rows, file, evaluated: None)
    recorder.screen.console.file = sys.stdout
    recorder.note_dropped(3, 7)
    said = " ".join(capsys.readouterr().out.split())
    assert "task.long_prompts=drop: 3 of 10 prompts are left out; they are longer than" in said
    assert recorder.finish(DoneTrainers())["dropped_prompts"] == 3
    assert json.loads((recorder.folder / "summary.json").read_text())["dropped_prompts"] == 3
