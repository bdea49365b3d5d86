# SPDX-License-Identifier: Apache-2.0
"""Test trackers: what each is sent, that none ends a run, and that a resume goes on with the tracker's own run.

The libraries are optional; a test of one that is not installed is skipped. Each is used in its offline mode.
"""

import json
import re
import signal
import sqlite3
import struct
import threading

import pytest

from megarl.controller import trackers
from megarl.controller.trackers import TRACKERS, check_trackers, is_installed
from megarl.controller.trackers.base import TrackedRun
from megarl.controller.trackers.feeds import Feeds
from megarl.errors import ConfigError

CONFIG = {"train.steps": 4, "lora.r": 8, "task.options": {"digits": 2}, "lora.target_modules": ["q_proj"]}
SUMMARY = {"steps": 4, "reward_last": 0.75, "held_out_after": {"reward": 0.5}, "names": ["x"]}


class Kept:
    """A tracker that keeps what it is sent, for the whole process."""

    sent: list = []  # noqa: RUF012

    def __init__(self, run):
        if run.config.get("refuse"):
            raise OSError("no server")
        self.id = run.id or "kept-1"
        self.sent.append(("open", run.id, run.step))

    def log(self, row):
        if row["reward"] < 0:
            raise SystemExit("a library that ends the process")
        self.sent.append(row)

    def finish(self, summary):
        self.sent.append(("finish", summary))


class Slow(Kept):
    free = threading.Event()

    def log(self, row):
        self.free.wait(20)


@pytest.fixture
def said():
    Kept.sent.clear()
    return []


def run_of(folder, step=None, **config):
    return TrackedRun(folder, "run", "megarl", CONFIG | config, step or 0, resumed=step is not None)


def feeds_of(said, *names):
    return Feeds([name if name in TRACKERS else f"{__name__}:{name}" for name in names], said.append)


def row(step, reward=0.5):
    return {"step": step, "reward": reward, "task/right answer?": 1.0}


def test_rows_arrive_in_order_and_a_resumed_run_gets_its_id_back(tmp_path, said):
    # The first session is lost before it has saved a step; the second one's last two are saved.
    for step, summary in ((None, None), (0, None), (2, SUMMARY)):
        feeds = feeds_of(said, "Kept")
        feeds.open(run_of(tmp_path, step))
        for number in ((step or 0) + 1, (step or 0) + 2):
            feeds.log(row(number))
        feeds.finish(summary)
        feeds.finish(None)  # as close() does
    first = [row(1), row(2), ("finish", None)]
    sessions = [("open", None, 0), *first, ("open", "kept-1", 0), *first, ("open", "kept-1", 2), row(3), row(4)]
    assert Kept.sent == [*sessions, ("finish", SUMMARY)]
    assert said == []


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(tmp_path, said):
    feeds = feeds_of(said, "Slow", "Kept")
    Slow.free.set()
    feeds.open(run_of(tmp_path))
    for step, reward in enumerate((0.1, -1.0, 0.3), start=1):
        feeds.log(row(step, reward))
    feeds.finish(SUMMARY)
    # In two threads, so in any order. Nothing follows the error, and the other tracker is finished.
    assert sorted(map(str, Kept.sent[2:])) == sorted(map(str, [row(1, 0.1), ("finish", SUMMARY)]))
    [message] = said
    assert "Kept' failed and gets nothing more of this run, which goes on: SystemExit: a library that" in message


def test_a_slow_tracker_holds_neither_the_run_nor_its_end(tmp_path, said, monkeypatch):
    monkeypatch.setattr("megarl.controller.trackers.feeds.FINISH_SECONDS", 0.2)
    Slow.free.clear()
    feeds = feeds_of(said, "Slow")
    feeds.open(run_of(tmp_path))
    feeds.log(row(1))
    feeds.finish(SUMMARY)
    Slow.free.set()
    [thread.join(10) for thread in threading.enumerate() if thread.name.startswith("tracker")]
    assert len(said) == 1 and "Slow' is still sending; the run does not wait for it any longer" in said[0]


def test_a_tracker_that_cannot_be_opened_ends_a_new_run_and_not_a_resumed_one(tmp_path, said):
    with pytest.raises(ConfigError, match="Kept' cannot be opened: OSError: no server; use its offline mode, or leave"):
        feeds_of(said, "Kept").open(run_of(tmp_path, refuse=True))
    feeds = feeds_of(said, "Kept")
    feeds.open(run_of(tmp_path, step=3, refuse=True))
    feeds.log(row(4))
    feeds.finish(SUMMARY)
    assert Kept.sent == []
    assert len(said) == 1 and "the run goes on without it" in said[0]


def test_ids_that_cannot_be_read_are_said(tmp_path, said):
    (tmp_path / "trackers.json").write_text("[1]")
    feeds_of(said, "Kept").open(run_of(tmp_path, step=1))
    assert Kept.sent == [("open", None, 1)]
    assert "trackers.json' cannot be read, so trackers begin a new run" in said[0]


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path):
    check_trackers(["tensorboard"])
    monkeypatch.setattr(trackers, "is_installed", lambda library: library == "tensorboard")
    for name in TRACKERS.keys() - {"tensorboard"}:
        with pytest.raises(ConfigError, match=f"'{name}', whose library is not installed; run: pip install {name}"):
            check_trackers(["tensorboard", name])
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    with pytest.raises(ConfigError, match="names 'tensorboard' twice"):
        check_trackers(["tensorboard", "tensorboard"])
    # wandb leaves a folder of its name in the current one, which Python takes for a package.
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("json") and not is_installed("left_behind") and not is_installed("no_such_library")


def two_sessions(name, folder, said):
    """Send a run that ends early after 2 steps and is resumed for 2 more; return the ids of both sessions."""
    ids = []
    for step, summary in ((0, None), (2, SUMMARY)):
        feeds = feeds_of(said, name)
        feeds.open(run_of(folder, step))
        for number in (step + 1, step + 2):
            feeds.log(row(number, number / 4))
        feeds.finish(summary)
        file = folder / "trackers.json"
        ids.append(json.loads(file.read_text())[name] if file.exists() else None)
    assert said == []
    return ids


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path, said):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_sessions("tensorboard", tmp_path, said)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(n, n / 4) for n in (1, 2, 3, 4)]


def wandb_records(folder):
    """Yield the records of a run's file: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.glob("*.wandb")
    data, place, record = file.read_bytes(), 7, b""
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed.WhichOneof("record_type"), parsed
            record = b""


def test_wandb_offline(tmp_path, said, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = two_sessions("wandb", tmp_path, said)
    assert first == second
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    # Sessions that begin in the same second have a number behind the id.
    assert len(folders) == 2 and all(re.search(rf"-{first}(-\d+)?$", folder.name) for folder in folders)
    history, config, summary, runs = [], {}, {}, []

    def items(values):
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in values}

    for kind, record in (found for folder in folders for found in wandb_records(folder)):
        if kind == "history":
            row = items(record.history.item)
            history.append((row["step"], row["reward"]))
        elif kind == "run":
            runs.append((record.run.run_id, record.run.display_name, record.run.project))
            config |= items(record.run.config.update)
        elif kind == "summary":
            summary |= items(record.summary.update)
    assert history == [(n, n / 4) for n in (1, 2, 3, 4)]
    assert set(runs) == {(first, "run", "megarl")}
    assert config["lora.r"] == 8 and config["folder"] == str(tmp_path)
    assert summary["reward_last"] == 0.75 and summary["held_out_after/reward"] == 0.5


def test_mlflow_in_a_local_data_base(tmp_path, said, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    first, second = two_sessions("mlflow", tmp_path, said)
    assert first == second
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run(first)
    assert [(m.step, m.value) for m in client.get_metric_history(first, "reward")] == [(n, n / 4) for n in (1, 2, 3, 4)]
    assert run.data.metrics["task/right answer_"] == 1.0 and run.data.metrics["summary/reward_last"] == 0.75
    assert run.data.params["lora.r"] == "8" and run.data.tags["folder"] == str(tmp_path)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert client.get_experiment(run.info.experiment_id).name == "megarl"


def test_trackio_in_its_local_data_base(tmp_path, said, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio")
    two_sessions("trackio", tmp_path, said)
    [file] = (tmp_path / "trackio").glob("megarl*.db")
    with sqlite3.connect(file) as base:
        found = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
        [(config,)] = base.execute("select config from configs").fetchall()
    rows = [(name, step, json.loads(text)) for name, step, text in found]
    assert [(*place, row["reward"]) for *place, row in rows[:4]] == [("run", n, n / 4) for n in (1, 2, 3, 4)]
    assert rows[4][:2] == ("run", 4) and rows[4][2]["summary/reward_last"] == 0.75 and len(rows) == 5
    assert json.loads(config)["lora.r"] == 8


def test_swanlab_offline(tmp_path, said, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    handler = signal.getsignal(signal.SIGINT)
    first, second = two_sessions("swanlab", tmp_path, said)
    assert first == second and signal.getsignal(signal.SIGINT) is handler
    files = [path.read_bytes() for path in sorted((tmp_path / "swanlog").glob(f"run-*-{first}/*.swanlab"))]
    # A scalar's record: its key, step, type, time, and the value as a double.
    scalars = re.findall(rb'\n\x06reward\x10(.)\x18\x01".{9,14}?\*\t\t(.{8})', b"".join(files), re.DOTALL)
    assert [(step[0], *struct.unpack("<d", value)) for step, value in scalars] == [(n, n / 4) for n in (1, 2, 3, 4)]
    assert len(files) == 2 and b"summary/reward_last" in files[1]
    configs = [path.read_text() for path in (tmp_path / "swanlog").glob(f"run-*-{first}/files/config.yaml")]
    assert all("lora.r:" in config and f"value: {tmp_path}\n" in config for config in configs)
