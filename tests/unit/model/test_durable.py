"""Folders appear whole or not at all, on disk before they have their name, and no writer touches another's."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from megarl.errors import CheckpointError
from megarl.model import durable
from megarl.model.durable import BackgroundWriter, discard, publish


def fill(folder):
    (folder / "inner").mkdir()
    for file in (folder / "a", folder / "inner" / "b"):
        file.write_text("x")


def test_every_file_and_folder_is_on_disk_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("rename"), rename(self, to)))
    publish(tmp_path / "new", fill)
    partial = str(tmp_path / ".new.partial")
    at = events.index("rename")
    assert set(events[:at]) == {partial, f"{partial}/a", f"{partial}/inner", f"{partial}/inner/b"}
    assert events[at + 1 :] == [str(tmp_path)]
    assert sorted(p.name for p in (tmp_path / "new").rglob("*")) == ["a", "b", "inner"]


def test_nothing_is_left_of_a_folder_that_cannot_be_filled_or_has_no_place(tmp_path):
    def broken(folder):
        fill(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        publish(tmp_path / "new", broken)
    publish(tmp_path / "taken", fill)
    with pytest.raises(OSError, match="not empty"):
        publish(tmp_path / "taken", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "taken"]


def test_what_killed_writers_left_is_removed_by_the_next_but_never_while_another_writes(tmp_path):
    left = tmp_path / ".old.partial"
    left.mkdir()
    fill(left)
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder):
        inside.set()
        assert go_on.wait(20)
        fill(folder)

    first = threading.Thread(target=publish, args=(tmp_path / "first", slow))
    first.start()
    assert inside.wait(20)
    assert not left.exists()
    second = threading.Thread(target=publish, args=(tmp_path / "second", fill))
    second.start()
    second.join(0.3)
    assert second.is_alive() and (tmp_path / ".first.partial").is_dir()
    go_on.set()
    first.join(20)
    second.join(20)
    assert all((tmp_path / name / "inner" / "b").is_file() for name in ("first", "second"))


def test_a_folder_that_another_process_keeps_locked_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "LOCK_SECONDS", 0.1)
    with durable._only_writer(tmp_path), pytest.raises(CheckpointError, match="give each run its own folder"):
        publish(tmp_path / "new", fill)


def test_discarding_hides_the_folder_before_it_removes_it(tmp_path, monkeypatch):
    publish(tmp_path / "old", fill)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed right after the rename
        discard(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    publish(tmp_path / "new", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "new"]


def test_jobs_run_one_after_the_other_and_a_failure_is_raised_once_by_the_next_call():
    done, go_on, writer = [], threading.Event(), BackgroundWriter()

    def first():
        assert go_on.wait(20)
        done.append("first")

    def fail():
        raise CheckpointError("no space left")

    writer.start(first)
    assert done == []
    threading.Timer(0.1, go_on.set).start()
    writer.start(fail)
    assert done == ["first"]
    with pytest.raises(CheckpointError, match="no space left"):
        writer.start(lambda: done.append("never"))
    writer.start(lambda: done.append("third"))
    writer.wait()
    writer.wait()
    assert done == ["first", "third"]
