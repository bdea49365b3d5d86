# SPDX-License-Identifier: Apache-2.0
"""Test the printed table, Markdown and JSON, and the exit status."""

import io
import json
import math

import pytest
from rich.console import Console

from megarl.cli import verify as cli
from megarl.cli.main import main
from megarl.config import parse_config
from megarl.verify import command
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Row
from megarl.verify.inputs.settings import verify_tree
from megarl.verify.report import as_json, markdown, matrix_markdown, table
from megarl.verify.run import Report
from tests.unit.verify.test_settings import SHAPE

GOOD = [Row("logprobs", "sample 3", 1.5e-7, 1e-5), Row("base weights", "w", 0.0, 0.0)]
BAD = [Row("logprobs", "sample 3", 1.5e-7, 1e-5), Row("gradients", "model.layers.3.q_proj.lora_B", 0.02, 1e-4)]
LINE = "first difference: model.layers.0.self_attn.q_proj (error 1.0e-02, bound 1.0e-05)"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return parse_config(verify_tree(tmp_path))


def report_of(config, rows, layout="TP2+SP", differences=()):
    case = Case("model", config, config.model.path, config.model.path)
    return Report(Place(case, layout, config), rows, "float64", list(differences))


def test_json_has_exactly_the_promised_keys(config):
    assert json.loads(as_json([report_of(config, BAD)])) == {
        "pass": False,
        "rows": [
            {"name": "logprobs", "worst": "sample 3", "error": 1.5e-7, "bound": 1e-5, "pass": True},
            {
                "name": "gradients",
                "worst": "model.layers.3.q_proj.lora_B",
                "error": 0.02,
                "bound": 1e-4,
                "pass": False,
            },
        ],
    }


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_json_stays_json_where_an_error_is_no_number(config, error):
    [row] = json.loads(as_json([report_of(config, [Row("logprobs", "s", error, 1e-5)])]))["rows"]
    assert (row["error"], row["pass"]) == (None, False)


def test_the_table_shows_every_row_and_marks_failures(config):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(report_of(config, BAD)))
    text = console.export_text()
    assert "TP2+SP, float32; truth in float64" in " ".join(text.split())
    assert [line.split()[-2] for line in text.splitlines() if "sample 3" in line] == ["yes"]
    assert [line.split()[-2] for line in text.splitlines() if "lora_B" in line] == ["NO"]


def test_markdown_ends_with_what_differs_first(config):
    lines = markdown(report_of(config, BAD, differences=[LINE])).splitlines()
    assert lines[:2] == ["| row | worst | error | bound | pass |", "| --- | --- | --- | --- | --- |"]
    assert lines[3] == "| gradients | model.layers.3.q_proj.lora_B | 2.0e-02 | 1.0e-04 | NO |"
    assert lines[-1] == LINE


def test_the_matrix_has_a_line_per_layout_with_its_worst_row(config):
    good = [BAD[0], Row("gradients", "model.layers.0.q_proj.lora_A", 1e-6, 1e-4)]
    reports = [report_of(config, good, "TP1"), report_of(config, BAD, "TP2+SP", [LINE])]
    refused, settings = {"needs pipeline": ["VPP2", "VPP2xDP2"]}, ["lora.r=4", "train.recompute=full"]
    lines = matrix_markdown(reports, refused, settings).splitlines()
    assert lines[0] == "Tiny random llama, float32; truth in float64; 2 layouts; lora.r=4, train.recompute=full."
    assert matrix_markdown(reports, refused).startswith("Tiny random llama, float32; truth in float64; 2 layouts.\n")
    assert lines[2] == "| layout | logprobs | gradients | nearest to its bound | pass |"
    assert lines[4] == "| bound | 1.0e-05 | 1.0e-04 |  |  |"
    assert lines[5] == "| TP1 | 1.5e-07 | 1.0e-06 | logprobs, 1% | yes |"
    assert lines[6] == "| TP2+SP | 1.5e-07 | 2.0e-02 | gradients, 20000% | NO |"
    assert lines[-3:] == [f"TP2+SP: {LINE}", "", "Refused: VPP2, VPP2xDP2: needs pipeline"]


@pytest.mark.parametrize(("rows", "status"), [(GOOD, 0), (BAD, 1)])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_exit_status_follows_the_rows(config, capsys, monkeypatch, tmp_path, rows, status, as_text):
    differences = [LINE] if status else []
    monkeypatch.setattr(
        command, "verify_model", lambda config, report, full: [report_of(config, rows, "TP1", differences)]
    )
    monkeypatch.setattr(cli, "warm_up", lambda: None, raising=False)
    arguments = ["verify", config.model.path, "--out", str(tmp_path / "table.md")]
    assert main(arguments if as_text else [*arguments, "--json"]) == status
    out, err = capsys.readouterr()
    assert (LINE in err) == bool(differences)
    assert (tmp_path / "table.md").read_text().startswith("| row |")
    if not as_text:
        assert json.loads(out)["pass"] == (status == 0)


def test_a_table_that_cannot_be_written_is_shown_before_that_is_said(config, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "verify_model", lambda config, report, full: [report_of(config, GOOD, "TP1", [])])
    monkeypatch.setattr(cli, "warm_up", lambda: None, raising=False)
    monkeypatch.setattr("megarl.cli.verify.write_text", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert main(["verify", config.model.path, "--json", "--out", str(tmp_path / "table.md")]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["pass"] is True and "table.md' cannot be written: no" in err


def test_the_matrix_and_the_first_difference_are_shown_though_the_folder_of_the_table_is_gone(
    config, capsys, monkeypatch, tmp_path
):
    out = tmp_path / "out"
    out.mkdir()

    def matrix(*_):
        out.rmdir()
        return [report_of(config, BAD, "TP2+SP", [LINE])], {}

    monkeypatch.setattr(command, "tiny_config", lambda config, folder: config)
    monkeypatch.setattr(command, "verify_matrix", matrix)
    monkeypatch.setattr("megarl.verify.launch.warm_up", lambda: None)
    assert main(["verify", config.model.path, "--matrix", "--out", str(out / "table.md")]) == 2
    shown, err = capsys.readouterr()
    assert "| TP2+SP | 1.5e-07 | 2.0e-02 | gradients, 20000% | NO |" in shown
    assert f"{LINE}\n" in err and "table.md' cannot be written: No such file or directory" in err
