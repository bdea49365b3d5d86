# SPDX-License-Identifier: Apache-2.0
"""Check that a log holds the output of a process and its children, and that the root of a failure is found in it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.controller.actors.logs import CAUSED, log_file, logs_exceptions, root_exception
from megarl.controller.actors.sampler_actor import SamplerEngine
from megarl.errors import DataError, WorkerError

PRINT = """
import subprocess, sys
from pathlib import Path
from megarl.controller.actors.logs import redirect_output
before = redirect_output(Path(sys.argv[1]))
print("from python")
subprocess.run(["sh", "-c", "echo from a child >&2"])
1 / before
"""

VLLM = """\
--- 2026-11-22 23:34:23 process 16735
ValueError: of an earlier session
--- 2026-11-22 23:35:23 process 16736
(EngineCore pid=7) ERROR 11-22 23:35:15 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-22 23:35:15 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 23:35:15 [core.py:1512]     raise ValueError(f"Head size {size} is not supported")
"""
RAISED = "(EngineCore pid=7) ERROR 11-22 23:35:15 [core.py:1512] ValueError: Head size 16 is not supported\n"
FRONT_END = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)\n"


def test_output_of_a_process_and_its_children_is_appended_to_the_log(tmp_path: Path) -> None:
    file = log_file(tmp_path / "logs", "trainer rank 0")
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PRINT, str(file)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
    text = file.read_text()
    assert file.name == "trainer-rank-0.log"
    assert text.count("from python") == text.count("from a child") == 2
    assert text.count("ZeroDivisionError: division by zero") == 1, "the second session begins after the first"


@pytest.mark.parametrize(
    ("text", "root"),
    [
        (VLLM + RAISED + FRONT_END, "ValueError: Head size 16 is not supported"),
        (VLLM + FRONT_END, None),
        (f"{VLLM}[a] OSError: the root\n\n[a] {CAUSED}:\n\n[a] RuntimeError: the surface\n", "OSError: the root"),
        (f"{VLLM}OSError: mended\nRuntimeError: another\n{FRONT_END}", "RuntimeError: another"),
        (VLLM + "torch.OutOfMemoryError: CUDA out of memory.\n", "OutOfMemoryError: CUDA out of memory."),
        (VLLM + "(EngineCore pid=7) AssertionError\n", "AssertionError"),
        (VLLM + "INFO Error: the word alone, in a sentence about a ValueError that nobody raised\n", None),
    ],
)
def test_the_root_exception_is_the_one_that_says_something(tmp_path: Path, text: str, root: str | None) -> None:
    (tmp_path / "log").write_text(text)
    assert root_exception(tmp_path / "log", text.index("process 16736")) == root


def test_an_engine_that_did_not_start_says_why_its_process_ended(tmp_path: Path) -> None:
    engine = object.__new__(SamplerEngine)
    engine._log, engine._log_begins = tmp_path / "log", VLLM.index("process 16736")
    engine._log.write_text(VLLM + RAISED + FRONT_END)
    with pytest.raises(WorkerError) as caught, engine._with_cause():
        raise WorkerError("sampler 0 did not start: Engine core initialization failed. See root cause above.")
    assert str(caught.value) == "sampler 0 did not start: ValueError: Head size 16 is not supported"
    with pytest.raises(WorkerError, match=r"^sampler 0: it is gone\nValueError: Head size 16 is"), engine._with_cause():
        raise WorkerError("sampler 0: it is gone")
    with pytest.raises(DataError, match=r"^a prompt$"), engine._with_cause():
        raise DataError("a prompt")


def test_a_log_that_is_not_there_has_no_exception(tmp_path: Path) -> None:
    assert root_exception(tmp_path / "none") is None


def test_what_methods_raise_is_printed_with_its_traceback(capsys: pytest.CaptureFixture) -> None:
    @logs_exceptions
    class Actor:
        def fail(self) -> None:
            raise KeyError("plain")

        async def fail_later(self) -> None:
            raise KeyError("asynchronous")

    with pytest.raises(KeyError):
        Actor().fail()
    with pytest.raises(KeyError):
        asyncio.run(Actor().fail_later())
    printed = capsys.readouterr().err
    assert "KeyError: 'plain'" in printed and "KeyError: 'asynchronous'" in printed
    assert printed.count("Traceback") == 2
