"""What a run folder holds after a resume: the run's own config, and only the metrics whose weights exist."""

import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from megarl.config import load_config, parse_config
from megarl.controller.metrics import Recorder, last_checkpoint, summarise
from megarl.controller.screen import Screen
from megarl.errors import CheckpointError
from tests.helpers.models import make_model


@pytest.fixture
def recorder(tmp_path):
    model = make_model(tmp_path / "model", "llama", tied=True)
    config = parse_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "arithmetic"},
            "sampler": {"max_prompt_tokens": 32, "max_response_tokens": 32},
            "train": {"resume": str(tmp_path / "run"), "seed": 5},
        }
    )
    recorder = Recorder(tmp_path / "run", config, Screen(3))
    yield recorder
    recorder.close()


def test_saved_config_is_the_runs_own_however_often_it_was_continued(recorder):
    saved = load_config(recorder.folder / "config.yaml")
    assert saved.train.resume is None
    assert saved.train.seed == 5


def test_rows_after_the_checkpoint_move_aside_and_nothing_is_lost(recorder):
    rows = [{"step": step, "reward": float(step)} for step in (1, 2, 3, 4)]
    (recorder.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorder.resume_at(2)
    kept, moved = (
        [json.loads(line) for line in (recorder.folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "metrics.discarded.jsonl")
    )
    assert (kept, moved) == (rows[:2], rows[2:])
    assert recorder.rows == rows[:2]


def test_only_a_complete_checkpoint_is_resumed_from(recorder):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        last_checkpoint(recorder.folder)
    for name, complete in (("step-000001", True), ("step-000002", True), ("step-000003", False)):
        folder = recorder.folder / "checkpoints" / name
        folder.mkdir()
        if complete:
            (folder / "state.json").write_text("{}")
    assert last_checkpoint(recorder.folder).name == "step-000002"


def test_summary_averages_the_ends_and_weighs_speed_by_time():
    rows = [
        {"reward": reward, "mismatch_mean": 0.1, "mismatch_max": peak, "trained_tokens": 10.0, "sampled_tokens": 4.0,
         "seconds/train": seconds, "seconds/sample": 2.0, "seconds/sync": 0.5}
        for reward, peak, seconds in ((0.0, 1.0, 1.0), (0.0, 3.0, 1.0), (0.3, 1.0, 2.0), (0.6, 1.0, 1.0))
    ]  # fmt: skip
    summary = summarise(rows)
    assert summary["reward_first"] == pytest.approx(0.1)
    assert summary["reward_last"] == pytest.approx(0.3)
    assert summary["mismatch_max"] == 3.0
    assert summary["train_tokens_per_second"] == pytest.approx(40 / 5)
    assert summary["sample_tokens_per_second"] == pytest.approx(2.0)


class FakeTrainers:
    """Writes its checkpoints when it is told to, as rank 0's thread does in its own time."""

    def __init__(self):
        self.saved, self.answer = [], Future()

    def call(self, method, *args):
        if method == "save_checkpoint":
            self.saved.append(Path(args[0]))

    def start_on_rank_zero(self, method):
        assert method == "finish_checkpoint"
        return self.answer

    def write(self, path):  # under another name until it is whole, as megarl.files.publish
        partial = path.with_name(f".{path.name}.partial")
        partial.mkdir()
        (partial / "state.json").write_text("{}")
        partial.rename(path)


def test_checkpoints_beyond_those_kept_go_only_once_newer_ones_are_complete(recorder):
    trainers, folder = FakeTrainers(), recorder.folder / "checkpoints"
    for step in (1, 2, 3, 4):
        if step > 1:
            trainers.write(trainers.saved[-1])  # the save before is complete when the next one is accepted
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
        if not busy:  # else rank 0 is stuck in a collective and never answers
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
    recorder.rescue(trainers)  # nothing is being written: nothing to wait for
    recorder.checkpoint(trainers, 1, {})
    trainers.answer.set_exception(CheckpointError("no space left"))
    recorder.rescue(trainers)
    assert "step-000001' is not complete: no space left" in capsys.readouterr().out
