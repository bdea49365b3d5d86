# SPDX-License-Identifier: Apache-2.0
"""Read the result of a program that a plain vLLM engine and its children also print from."""

import textwrap

import pytest

from megarl.errors import WorkerError
from megarl.sampler.plain import engine


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return what makes a module of lines and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(lines: str) -> str:
        (tmp_path / "program.py").write_text(textwrap.dedent(lines))
        return "program"

    return make


def test_the_last_object_counts_though_something_is_printed_after_it(program, tmp_path):
    name = program("""
        print('{"a": 1}')
        print('{"a": 2}')
        print("a child ends")
    """)
    assert engine.run_json(name, [], tmp_path / "log") == {"a": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('nothing')", "ended with status 0"),
        ("import time; time.sleep(60)", "took longer than 1 s"),
    ],
)
def test_a_program_without_a_result_is_a_named_error(program, tmp_path, monkeypatch, lines, message):
    monkeypatch.setattr(engine, "RUN_SECONDS", 1.0)
    with pytest.raises(WorkerError, match=message):
        engine.run_json(program(lines), [], tmp_path / "log")
