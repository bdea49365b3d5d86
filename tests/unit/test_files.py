# SPDX-License-Identifier: Apache-2.0
"""Check that folders appear complete or not at all, are on disk before they have their name, and have one writer."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl import files
from megarl.errors import CheckpointError, ConfigError
from megarl.files import append_line, discard, publish, user_path, write_text
from megarl.folder_lock import FolderLock
from megarl.model.checkpoint.writer import BackgroundWriter


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
    remains = tmp_path / ".old.partial"
    remains.mkdir()
    fill(remains)
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder):
        inside.set()
        assert go_on.wait(20)
        fill(folder)

    first = threading.Thread(target=publish, args=(tmp_path / "first", slow))
    first.start()
    assert inside.wait(20)
    assert not remains.exists()
    second = threading.Thread(target=publish, args=(tmp_path / "second", fill))
    second.start()
    second.join(0.3)
    assert second.is_alive() and (tmp_path / ".first.partial").is_dir()
    go_on.set()
    first.join(20)
    second.join(20)
    assert all((tmp_path / name / "inner" / "b").is_file() for name in ("first", "second"))


def test_a_folder_that_another_process_keeps_locked_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with files._only_writer(tmp_path), pytest.raises(CheckpointError, match="give each run its own folder"):
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


LIMITED = """
import resource, sys
from pathlib import Path
from megarl.files import append_line, write_text
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the disk is full
for write in (lambda: append_line(folder / "lines", "x" * 80), lambda: write_text(folder / "text", "x" * 200)):
    try:
        write()
    except OSError as error:
        print(error.strerror)
"""


def test_a_full_disk_leaves_whole_lines_and_the_old_file(tmp_path):
    append_line(tmp_path / "lines", "a" * 60)
    write_text(tmp_path / "text", "old")
    ran = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["File too large"] * 2, ran.stderr
    assert (tmp_path / "lines").read_text() == "a" * 60 + "\n"
    assert (tmp_path / "text").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "text"]


def test_a_folder_has_one_holder_who_is_named_and_freed_when_it_ends(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is in use by process {os.getpid()} on .*; wait until it ends"):
        FolderLock(tmp_path)
    first.release()
    first.release()
    code = (
        "import sys; from pathlib import Path; from megarl.folder_lock import FolderLock; FolderLock(Path(sys.argv[1]))"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    FolderLock(tmp_path).release()


def test_a_folder_that_is_deleted_or_replaced_is_noticed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder)
    lock.check()
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="run' is gone: it was deleted"):
        lock.check()
    folder.mkdir()
    other = FolderLock(folder)
    with pytest.raises(CheckpointError, match="run' is another one now"):
        lock.check()
    other.check()


@pytest.mark.parametrize("path", ["~nosuchuser/x", "n" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused_with_its_setting(path):
    with pytest.raises(ConfigError, match=r"^train\.output is .*, which cannot be a path: "):
        user_path("train.output", path)


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "said")
    assert os.read(reader, 10) == b"said" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
