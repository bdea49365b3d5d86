# SPDX-License-Identifier: Apache-2.0
"""Test the documents: the site builds without a warning, links resolve, lines are short enough to read."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megarl

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="requirements/docs.txt is not installed")
def test_the_site_builds_without_warnings_and_has_every_setting_and_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", "scripts/docs/mkdocs.yml"]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "NO_MKDOCS_2_WARNING": "1",
    }
    done = subprocess.run(
        [*command, "-d", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "configuration/index.html").read_text()
    for setting in ("model.path", "sampler.parallel.tensor", "train.max_mismatch", "eval.tasks[].top_p"):
        assert f"<code>{setting}</code>" in page
    page = (tmp_path / "api/index.html").read_text()
    assert all(f'id="{name.lower()}"' in page for name in megarl.__all__ if name != "__version__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_lines_are_short(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), f"{target} does not exist"
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    assert max(map(len, prose)) <= 120, max(prose, key=len)


def test_the_pytest_commands_of_the_pages_select_tests() -> None:
    commands = re.findall(
        r"^    python -m pytest (\S+)(?: -k (\w+))?", "\n".join(p.read_text() for p in PAGES), re.MULTILINE
    )
    assert len(commands) > 2
    for place, word in commands:
        files = [ROOT / place] if place.endswith(".py") else list((ROOT / place).rglob("test_*.py"))
        assert any(re.search(rf"^def test_\w*{word}", file.read_text(), re.MULTILINE) for file in files), (place, word)
