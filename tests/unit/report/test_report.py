# SPDX-License-Identifier: Apache-2.0
"""Test `megarl report`: what it shows, that no text of a run gets a hold of the page, and damaged run folders."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.errors import ConfigError
from megarl.report.charts import MOST_POINTS, Line, line_chart, thinned, ticks
from megarl.report.page import page
from megarl.report.runs import read_completions, read_runs

EVIL = "</pre><script>document.documentElement.setAttribute('data-ran', '1'); console.error('ran')</script>\ud800\x00"
TAGS = {
    *("html", "head", "meta", "title", "link", "style", "body", "h1", "h2", "div", "span", "p", "b", "pre", "ul", "li"),
    *("figure", "figcaption", "svg", "g", "line", "text", "polyline", "circle", "rect", "details", "summary"),
    *("table", "tr", "th", "td"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def make_run(folder: Path, steps: int = 5, rank: int = 8) -> Path:
    """Write the files that a run leaves."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"train: {{steps: {steps}}}\nlora: {{r: {rank}}}\ntask: {{name: '{EVIL[:40]}'}}\n"
    )
    rows = [
        {"step": step, "reward": step / 10, "task/correct": 0.5, "loss": -0.1, "grad_norm": 0.3, "entropy": 1.0,
         "response_tokens": 7.0, "mismatch_mean": 1e-4, "mismatch_max": 1e-2 * step, "groups_without_signal": 0.25,
         "truncated": 0.0, "seconds/sample": 3.0, "seconds/train": 2.0, f"task/{EVIL}": 1.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, value in ((0, 0.1), (steps, 0.6)):
        results = folder / "evaluations" / f"step-{step:06d}" / "results.json"
        results.parent.mkdir(parents=True)
        metrics = {"reward": {"value": value, "low": 0.05, "high": None}, EVIL: {"value": 0.5}}
        results.write_text(json.dumps({"step": step, "sets": {"held_out": {"prompts": 2, "metrics": metrics}}}))
    summary = {"reward_first": 0.1, "reward_last": 0.5, "grad_tensors": 28.0}
    after = {"held_out/reward": 0.6, "held_out/reward_low": 0.5, "held_out/reward_high": 0.7}
    summary |= {"eval_before": {"held_out/reward": 0.1}, "eval_after": after}
    (folder / "summary.json").write_text(json.dumps(summary))
    for step in range(1, steps + 1):
        completions = [
            {"prompt": EVIL, "messages": [{"role": "user", "content": EVIL}], "text": f"{EVIL} {index} of {step}",
             "reward": index / 10, "metrics": {EVIL: 1.0}, "advantage": [0.5, 1.0], "finish_reason": "stop",
             "version": step - 1, "logprobs": [-0.5, -1.25]}
            for index in range(8)
        ]  # fmt: skip
        file = folder / "rollouts" / f"step-{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in completions))
    return folder


class Elements(HTMLParser):
    """Collects a page's elements, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_data(self, data):
        self.text += data


def figure(text: str, title: str) -> str:
    figures = re.findall("<figure>.*?</figure>", text, re.DOTALL)
    return next(figure for figure in figures if f"<figcaption>{title}</figcaption>" in figure)


def test_the_page_shows_curves_times_summary_settings_and_completions(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run), "--steps", "2,4"]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    for title in ("reward", "loss", "gradient norm", "entropy", "length", "mismatch", "shares"):
        assert figure(text, title).count("<circle") % 5 == 0 != figure(text, title).count("<circle"), title
    assert figure(text, "evaluation: held_out").count("<circle") == 4
    assert figure(text, "run").count("<rect") == 2 * 5
    assert "reward, step 3: 0.3<" in text and "step 3, sample: 3 seconds" in text
    shown = Elements(text).text
    assert "reward, first steps -> last steps0.100, 0.500" in shown
    assert "held_out/reward [95%], before -> after0.100, 0.600 [0.500, 0.700]" in shown
    assert "lora.r8" in shown
    assert "7 of 2" in shown and "0 of 4" in shown and "0 of 3" not in shown
    assert "reward 0.7, advantage 2 values, finish_reason stop" in shown
    assert "token 2: -1.250" in text


def test_settings_that_differ_between_runs_are_shown_and_no_others(tmp_path):
    runs = read_runs([str(make_run(tmp_path / name, rank=rank)) for name, rank in (("a", 8), ("b", 16))])
    table = Elements(page(runs)).text.partition("Settings that differ")[2].partition("Completions")[0]
    assert table == "settingablora.r816"
    assert {f"{name}: reward" for name in "ab"} <= set(re.findall(r"[ab]: reward(?=<)", page(runs)))


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [make_run(tmp_path / parent / "run", steps=1) for parent in "ab"]
    assert [run.label for run in read_runs([str(folder) for folder in folders])] == [str(folder) for folder in folders]


def test_no_text_of_a_run_becomes_an_element_or_a_handler(tmp_path):
    run = make_run(tmp_path / "<script>alert(1)</script> \" ' &")
    text = page(read_runs([str(run)]), [1])
    found = Elements(text)
    assert found.tags <= TAGS
    assert not [name for name in found.attributes if name.startswith("on")]
    assert found.attributes.get("href") == {"data:,"} and "src" not in found.attributes
    assert text.encode() and "\x00" not in text and EVIL[:-2] in found.text
    assert "default-src 'none'" in text


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
root.dataset.places = new Set(seen.map((box) => `${box.x} ${box.y}`)).size;
console.warn('probed');
</script>"""


def test_a_browser_shows_the_curves_and_runs_nothing(tmp_path):
    text = page(read_runs([str(make_run(tmp_path / "run"))]))
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
    # The console is read, and a script that is not escaped would run.
    (tmp_path / "evil.html").write_text(f"<!DOCTYPE html><html><body>{EVIL[6:-2]}</body></html>")
    elements, console = opened(tmp_path / "evil.html", tmp_path / "profile")
    assert 'data-ran="1"' in root_of(elements) and "ran" in console[0]


GONE: object = None
ODD = """{"step": 1, "reward": NaN, "loss": 1e99, "grad_norm": Infinity, "entropy": null, "seconds/train": -1}
{"step": 2, "reward": "x", "loss": -1e99, "mismatch_mean": 0, "mismatch_max": 5e-324}
"""
HUGE = "1" + "0" * 400
RESULTS = "evaluations/step-000000/results.json"
STEP = "rollouts/step-000001.jsonl"


@pytest.mark.parametrize(
    ("file", "content", "note"),
    [
        ("metrics.jsonl", GONE, "there is no metrics.jsonl: no step has ended"),
        ("metrics.jsonl", "", None),
        (
            "metrics.jsonl",
            '{"step": 1, "reward": 0.5}\n{"step": 2, "rew',
            "1 line is no row and left out, the first is line 2",
        ),
        ("metrics.jsonl", '[]\n3\n{"step": "x"}\n\x00\n', "metrics.jsonl: 4 lines are no row"),
        ("metrics.jsonl", ODD, None),
        ("metrics.jsonl", f'{ODD}{{"step": {HUGE}}}\n', "1 line is no row and left out, the first is line 3"),
        ("rollouts", GONE, "there is no rollouts/"),
        ("rollouts", "a file", "there is no rollouts/"),
        (STEP, '{"text": "x", "logprobs": [null]}\n{"te', "step-000001.jsonl: 1 line is no completion"),
        (STEP, "\ufffe\n" * 3, "step-000001.jsonl: 3 lines are no completion"),
        ("config.yaml", "a: [\n", "config.yaml is damaged"),
        ("config.yaml", "[1]", "config.yaml is damaged: it holds no mapping"),
        ("config.yaml", "\x00", "config.yaml is damaged"),
        ("summary.json", GONE, "there is no summary.json: the run has not ended"),
        ("summary.json", f'{{"reward_first": {HUGE}, "seconds": NaN}}', None),
        (RESULTS, '{"sets": {"held_out": {"metrics": {"reward": {"value": "x"}, "other": 3}}}}', None),
        (RESULTS, '{"sets": [1]}', None),
        (RESULTS, "{", "evaluations/step-000000/results.json is damaged"),
    ],
)
def test_a_damaged_run_is_shown_as_far_as_it_goes_and_the_damage_is_named(file, content, note, tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=2)
    shutil.rmtree(run / file) if (run / file).is_dir() else (run / file).unlink()
    if content is not GONE:
        (run / file).write_text(content)
    assert main(["report", str(run)]) == 0
    *notes, path = capsys.readouterr().out.splitlines()
    text = Path(path).read_text()
    assert Elements(text).tags <= TAGS and not re.search(r"\b(nan|inf)\b", re.sub("<pre>.*?</pre>", "", text))
    assert (len(notes) == 1 and note in notes[0]) if note else not notes
    assert all(note.removeprefix("run: ") in Elements(text).text for note in notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "RUN is 'nothing', which is not a run folder: there is no such folder"),
        (["."], "RUN is '.', which is not a run folder: it holds neither config.yaml nor metrics.jsonl"),
        (["run", "run/../run"], "RUN 'run/../run' is named twice"),
        (["run", "--out", "."], "--out is '.', which is a folder"),
        (["run", "--out", "no/page.html"], "--out is 'no/page.html', which is in"),
        (["run", "--steps", "1,x"], "--steps is '1,x', of which 'x' is not a step"),
    ],
)
def test_a_wrong_argument_is_one_message(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", steps=1)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_completions_shown_are_the_first_and_those_of_least_and_greatest_reward(tmp_path):
    file = tmp_path / "step-000001.jsonl"
    rewards = [0.5, 0.4, 0.3, 0.9, 0.1, 0.2]
    file.write_text("".join(json.dumps({"text": str(i), "reward": r}) + "\n" for i, r in enumerate(rewards)))
    rows, problem = read_completions(file, 4)
    assert ([row["text"] for row in rows], problem) == (["0", "3", "4", "1"], None)


def test_curves_break_into_means_when_there_are_more_points_than_pixels():
    line = thinned(Line("x", {step: float(step) for step in range(1, 3 * MOST_POINTS + 1)}))
    assert len(line.points) == MOST_POINTS and line.points[2] == 2.0 and "means of 3 steps" in line.label
    assert "no values" in line_chart("t", "u", [Line("x", {1: -1.0, 2: 0.0})], log=True)
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(3 <= len(ticks(low, high)) <= 11 for low, high in ((-3.0, 7e5), (1e-9, 3e-9), (1e12, 1e12 + 7)))


def test_a_folder_that_is_no_run_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        read_runs([str(tmp_path)])
