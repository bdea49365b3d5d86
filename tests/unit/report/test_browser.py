# SPDX-License-Identifier: Apache-2.0
"""Open a report in a headless browser: what is drawn is seen, and no text of a run becomes a script."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megarl.report.completions import chosen_steps
from megarl.report.page import page
from megarl.report.runs import read_runs
from tests.unit.report.support import EVIL, make_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    return found


def opened(file: Path, profile: Path) -> tuple[str, list[str]]:
    """Open a page in a headless browser; return its elements after loading and the messages of its console."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--window-size=1400,2000", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)


def root_of(elements: str) -> str:
    """Return the opening tag of <html>."""
    return re.search("<html[^>]*>", elements)[0]


PROBE = """<script>
const root = document.documentElement;
const seen = [...document.querySelectorAll('circle')].map((dot) => dot.getBoundingClientRect());
root.dataset.drawn = seen.filter((box) => box.width > 1 && box.left > 0 && box.right < innerWidth).length;
const tokens = [...document.querySelectorAll('pre.tokens span')].filter((token) => token.title);
root.dataset.tokens = tokens.filter((token) => token.getBoundingClientRect().width > 1).length;
root.dataset.colours = [...new Set(tokens.map((token) => getComputedStyle(token).backgroundColor))].sort().join(' ');
root.dataset.places = new Set(seen.map((box) => `${box.x} ${box.y}`)).size;
console.warn('probed');
</script>"""


def test_a_browser_shows_the_curves_and_runs_nothing(tmp_path):
    text = page(read_runs([str(make_run(tmp_path / "run", stale=True))]))
    (tmp_path / "page.html").write_text(text)
    elements, console = opened(tmp_path / "page.html", tmp_path / "profile")
    assert console == [] and "data-ran" not in root_of(elements)
    # Without its policy, and with a script of ours that measures what is drawn: escaping alone stops theirs.
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert open_page != text
    (tmp_path / "probed.html").write_text(open_page.replace("</body>", f"{PROBE}</body>"))
    elements, console = opened(tmp_path / "probed.html", tmp_path / "profile")
    assert len(console) == 1 and "probed" in console[0]
    root = root_of(elements)
    assert "data-ran" not in root
    dots = text.count("<circle")
    assert f'data-drawn="{dots}"' in root
    assert int(re.search(r'data-places="(\d+)"', root)[1]) > dots / 2
    tokens = 2 * 3 * len(chosen_steps(range(1, 6), ()))
    assert text.count('title="token') == tokens and f'data-tokens="{tokens}"' in root
    assert 'data-colours="rgb(0, 114, 178) rgba(0, 0, 0, 0) rgba(213, 94, 0, 0)"' in root
    # The console is read, and a script that is not escaped would run.
    (tmp_path / "evil.html").write_text(f"<!DOCTYPE html><html><body>{EVIL[6:-2]}</body></html>")
    elements, console = opened(tmp_path / "evil.html", tmp_path / "profile")
    assert 'data-ran="1"' in root_of(elements) and "ran" in console[0]
