# SPDX-License-Identifier: Apache-2.0
"""Test `megarl report`: what it shows, that no text of a run gets a hold of the page, and damaged run folders."""

import json
import re
import shutil
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.errors import ConfigError
from megarl.report.charts import MOST_POINTS, Line, line_chart, thinned, ticks
from megarl.report.completions import NO_TEXT
from megarl.report.page import page
from megarl.report.runs import read_completions, read_runs
from tests.unit.report.support import COMPARED, EVIL, Elements, figure, make_run

TAGS = {
    *("html", "head", "meta", "title", "link", "style", "body", "h1", "h2", "div", "span", "p", "b", "pre", "ul", "li"),
    *("figure", "figcaption", "svg", "g", "line", "text", "polyline", "circle", "rect", "details", "summary"),
    *("table", "tr", "th", "td"),
}


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


def test_tokens_that_the_trainer_computed_too_show_both_logprobs_and_a_colour(tmp_path):
    text = page(read_runs([str(make_run(tmp_path / "run", steps=1))]))
    tokens = re.findall(r'<pre class="tokens">(.*?)</pre>', text, re.DOTALL)
    assert len(tokens) == 2 and "largest |sampler - trainer| 1" in Elements(text).text
    found = re.findall(r'<span ([^>]*)title="([^"]*)">([^<]*)</span>', tokens[0])
    assert [title for _, title, _ in found] == [
        "token 1: sampler -0.5000, trainer -0.5002, difference +2.00e-04",
        "token 2: not drawn",
        "token 3: sampler -1.2500, trainer -0.2500, difference -1.00e+00",
    ]
    # A difference below a thousandth of a nat has no colour, one of 1 nat all of it.
    assert [style for style, *_ in found] == [
        'style="background:rgba(213,94,0,0.00)" ', 'class="given" ', 'style="background:rgba(0,114,178,1.00)" ',
    ]  # fmt: skip
    assert found[2][2] == NO_TEXT
    assert text.count("not drawn") == 2 and "&lt;script&gt;" in found[0][2]


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": ["a", "b"]},
        {"pieces": [1, 2, 3]},
        {"drawn": [[0, 10**12], [2, 3]]},
        {"drawn": [[2, 3], [0, 1]]},
        {"drawn": [[0, float("inf")]]},
        {"drawn": 3},
        {"trainer_logprobs": [-0.5]},
        {"trainer_logprobs": [None, 1.0]},
        {"logprobs": []},
    ],
)
def test_a_completion_whose_parts_do_not_fit_is_plain_text(tmp_path, change):
    run = make_run(tmp_path / "run", steps=1)
    row = {"text": "all of it", "logprobs": [-0.5, -1.25], **COMPARED, **change}
    (run / "rollouts" / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    text = page(read_runs([str(run)]))
    assert "<pre>all of it</pre>" in text and 'class="tokens"' not in text


def test_asynchronous_runs_have_panels_of_staleness_and_others_have_none(tmp_path):
    runs = [str(make_run(tmp_path / name, stale=name == "async")) for name in ("async", "sync")]
    text = page(read_runs(runs))
    assert figure(text, "staleness of tokens").count("<circle") == 10
    assert "async: too old, sampled again, step 2: 1<" in figure(text, "groups")
    assert "async: scored, waiting, step 1: 3<" in figure(text, "buffer")
    assert "step 3, 1 versions: 0.75 share of the step" in figure(text, "async: age of tokens")
    assert "sync: too old" not in text.replace("async: too old", "")
    assert "Staleness" not in page(read_runs(runs[1:]))


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
