# SPDX-License-Identifier: Apache-2.0
"""Test `megarl bench sync` around its engines and its trainer, which stand-ins replace."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.bench.random_weights import TMPFS
from megarl.bench.settings import model_config
from megarl.bench.syncing import peers, sync
from megarl.bench.syncing.settings import parse_sync_settings
from megarl.cli.main import main
from megarl.errors import WorkerError

ROW = {"kind": "merged", "tensors": 2, "nbytes": 2**20, "ms": 2.0, "worst_ms": 3.0, "stages_ms": {}}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand for the trainer's model, with engines that nothing has to start."""
    groups = SimpleNamespace(device=torch.device("cpu"), rank=0)
    made = SimpleNamespace(groups=groups, version=0, hf_config={"vocab_size": 50}, save_adapter=lambda folder: None)
    monkeypatch.setattr(sync, "SyncTrainer", lambda *_: SimpleNamespace(model=made, end=lambda: None))
    monkeypatch.setattr(sync, "_engines", lambda *_: contextlib.nullcontext(([None], 1.0)))
    monkeypatch.setattr(sync, "copy_rate", lambda *_: 10.0)
    return made


@pytest.mark.parametrize(("rank", "buffer"), [(4, 8), (24, 32), (32, 32), (48, 64)])
def test_vllms_own_way_gets_a_buffer_that_holds_the_rank(model, tmp_path: Path, monkeypatch, rank, buffer) -> None:
    asked = []

    def load(settings: dict, adapters: list[str], log: Path) -> dict:
        asked.append(settings["rank"])
        return {"start_seconds": 5.0, "load_ms": 50.0}

    monkeypatch.setattr(sync, "_measure", lambda *_: ("ipc", [dict(ROW)]))
    monkeypatch.setattr(peers, "time_plain_engine", load)
    report = sync.bench_sync(parse_sync_settings("tiny", [f"r={rank}", "contents=[merged]"]), tmp_path)
    assert asked == [buffer] and report["disk"]["load_ms"] == 50.0


def test_what_is_measured_leaves_the_users_folders_alone(model, tmp_path: Path, monkeypatch) -> None:
    """The adapters that vLLM's own way loads go into memory-backed files, wherever the model is."""
    given = tmp_path / "models" / "own"
    given.mkdir(parents=True)
    (given / "config.json").write_text(json.dumps(model_config("tiny")))
    folders = []
    model.save_adapter = folders.append
    monkeypatch.setattr(sync, "_measure", lambda *_: ("ipc", [dict(ROW)]))
    monkeypatch.setattr(peers, "time_plain_engine", lambda *_: {"start_seconds": 5.0, "load_ms": 50.0})
    sync.bench_sync(parse_sync_settings(str(given), ["contents=[merged]"]), tmp_path / "out")
    assert len(folders) == 3 and all(folder.parent.parent == Path(TMPFS) for folder in folders)
    assert [file.name for file in given.parent.rglob("*")] == ["own", "config.json"]


@pytest.mark.parametrize(("rank", "message"), [(4, "ended with status 1"), (600, "vLLM supports at most 512")])
def test_what_was_measured_is_printed_though_vllms_own_way_failed(
    model, tmp_path: Path, monkeypatch, capsys, rank: int, message: str
) -> None:
    def fail(*_: object) -> dict:
        raise WorkerError("the plain vLLM engine ended with status 1")

    monkeypatch.setattr(sync, "_measure", lambda *_: ("ipc", [dict(ROW)]))
    monkeypatch.setattr(peers, "time_plain_engine", fail)
    assert main(["bench", "sync", "tiny", f"r={rank}", "contents=[merged]", "--out", str(tmp_path)]) == 0
    *table, report = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("vLLM's own way (save and load) failed:") and message in line for line in table)
    assert json.loads(report)["rows"] == [ROW] and message in json.loads(report)["disk_error"]


def test_checkpoint_engine_is_measured_where_it_is_installed_and_there_is_a_gpu(tmp_path: Path, monkeypatch) -> None:
    def fail(settings: dict, log: Path) -> dict:
        assert (settings["gpu"], log.name) == ("6", "sync-moonshot.log")
        raise WorkerError("no memory")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(peers, "_disk", lambda *_: {"load_ms": 1.0})
    monkeypatch.setattr(peers, "time_moonshot", fail)
    for installed, gpu, expected in [(True, 1, {"moonshot_error": "no memory"}), (False, 1, {}), (True, None, {})]:
        monkeypatch.setattr(peers, "is_installed", lambda installed=installed: installed)
        said: list[str] = []
        found = peers.measure_peers(parse_sync_settings("tiny"), None, tmp_path, tmp_path, tmp_path, gpu, said.append)
        assert found == {"disk": {"load_ms": 1.0}} | expected and len(said) == 1 + len(expected)
