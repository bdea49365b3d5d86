# SPDX-License-Identifier: Apache-2.0
"""Test properties of every source file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megarl", "examples", "scripts", "tests")
SOURCES = [ROOT / "setup.py", ROOT / ".ci/run"] + [
    file
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in (".py", ".sh", ".sbatch", ".Dockerfile")
]
MOST_LINES = 300
MOST_LINES_OF_FUNCTION = 75
QUESTION_WORDS = {"Which", "What", "Where", "How", "Whether", "Why"}


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_every_source_file_begins_with_its_licence(folder: str) -> None:
    without = [
        str(file.relative_to(ROOT))
        for file in SOURCES
        if (file.is_relative_to(ROOT / folder) if folder else file.parent in (ROOT, ROOT / ".ci"))
        and "# SPDX-License-Identifier: Apache-2.0" not in file.read_text().splitlines()[:2]
    ]
    assert not without, f"put '# SPDX-License-Identifier: Apache-2.0' first in {', '.join(without)}"


def test_docstrings_say_what_the_code_does_instead_of_asking() -> None:
    questions = [
        f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for file in SOURCES
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "").partition(" ")[0] in QUESTION_WORDS
    ]
    assert not questions, f"begin the docstring with what the code does or holds in {', '.join(questions)}"


def test_files_are_short_enough_to_read() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in SOURCES}
    long = [f"{file.relative_to(ROOT)} ({count})" for file, count in lines.items() if count > MOST_LINES]
    assert not long, f"split by subject, at most {MOST_LINES} lines a file: {', '.join(long)}"


def test_functions_are_short_enough_to_read() -> None:
    long = [
        f"{node.name} in {file.relative_to(ROOT)}:{node.lineno} ({count})"
        for file in SOURCES
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (count := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES_OF_FUNCTION
    ]
    assert not long, f"split by step, at most {MOST_LINES_OF_FUNCTION} lines a function: {', '.join(long)}"


def test_no_two_custom_operations_have_one_name() -> None:
    """torch lets the module that is imported last replace the other's operation without a word."""
    defined: dict[str, list[str]] = {}
    for file in SOURCES:
        for name in re.findall(r'custom_op\("([\w:]+)"', file.read_text()) if file.suffix == ".py" else ():
            defined.setdefault(name, []).append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in defined.items() if len(files) > 1}
    assert not twice, f"rename one of each: {twice}"
