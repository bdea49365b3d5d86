# SPDX-License-Identifier: Apache-2.0
"""Test the table of a run's start-up, and what is read from vLLM's log for it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from megarl.controller.actors.logs import parts_of_start
from megarl.controller.recording import start_times
from megarl.controller.recording.screen import Screen
from megarl.controller.recording.start_times import StartTimes

# As vLLM 0.26 and 0.32 print them.
LOG = """
(EngineCore pid=7) INFO 11-24 00:00:00 [model_runner.py:306] Model loading took 1.12 GiB and 2.345678 seconds
(EngineCore pid=7) INFO 11-24 00:00:00 [model_runner.py:748] Graph capturing finished in 9 secs, took 0.41 GiB
(EngineCore pid=7) INFO 11-24 00:00:00 [core.py:341] init engine (profile, create kv cache, warmup model) took 21.50 s \
(compilation: 6.25 s)
"""


def test_a_table_says_where_the_time_before_the_first_step_went(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(start_times.time, "time", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    start = StartTimes(91.5)
    now[0] = 95.0
    start.phase("config, task, tokenizer")
    now[0] = 100.0
    with Screen(3, console, start) as screen:
        screen.phase("Ray")
        now[0] = 104.0
        screen.phase("building")
        now[0] = 130.0
        screen.start.parts("trainer rank 0", {"imports": 4.0, "model": 9.25})
        screen.start.parts("sampler 0", {"imports": 8.0, "vLLM": 18.0})
        screen.phase("sync")
        now[0] = 131.0
        screen.phase("sample")
        now[0] = 140.0
        screen.phase("Ray")
        screen.phase("sample")
    lines = console.file.getvalue().splitlines()
    first = lines.index("start-up: 39.5 s from the command to the first step")
    assert lines[first + 1 : first + 8] == [
        "     3.5 s  imports",
        "     5.0 s  config, task, tokenizer",
        "     4.0 s  Ray",
        "    26.0 s  building",
        "            trainer rank 0: imports 4.0, model 9.2",
        "            sampler 0: imports 8.0, vLLM 18.0",
        "     1.0 s  sync",
    ]
    assert sum("start-up" in line for line in lines) == 1


def test_the_default_beginning_is_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    table = StartTimes().phase("sample")
    assert table is not None and 0 < float(table.split()[1]) < 24 * 3600


def test_vllms_log_tells_the_parts_of_its_start(tmp_path: Path) -> None:
    log = tmp_path / "sampler-0.log"
    log.write_text("Model loading took 9 GiB and 9.0 seconds\n" + LOG)
    begins = len("Model loading took 9 GiB and 9.0 seconds\n")
    assert parts_of_start(log, begins) == {"weights": 2.345678, "init": 21.5, "compilation": 6.25, "graphs": 9.0}
    assert parts_of_start(tmp_path / "none.log") == {}
