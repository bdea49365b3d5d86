# SPDX-License-Identifier: Apache-2.0
"""Test the display of a run on a terminal and in a log, the warning when nothing is learned, and the plot."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from megarl.controller.recording import screen as module
from megarl.controller.recording.plot import plot_run
from megarl.controller.recording.screen import Screen, shorten
from megarl.controller.recording.stall import PATIENCE, StallWatch
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.rollout import Rollout
from megarl.report.panels import cells
from megarl.tasks import Reward
from megarl.types import Completion, Prompt, Trajectory


def row(step, **values):
    return {
        "step": step, "reward": 0.25, "groups_without_signal": 0.5, "loss": -0.01, "grad_norm": 0.3, "entropy": 0.7,
        "response_tokens": 9.0, "mismatch_mean": 1e-3, "mismatch_max": 1e-2, "seconds/sample": 1.0,
        "seconds/train": 2.0, "seconds/sync": 0.1,
    } | values  # fmt: skip


def shown(*, terminal, steps, width=100):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with Screen(steps, console) as screen:
        for step in range(1, steps + 1):
            for phase in ("sample", "train"):
                screen.phase(phase)
            screen.step(row(step))
            screen.completion("What is 3 + 4?\nReply.", "3 + 4 = 7", 0.6)
    erased = console.file.getvalue().replace("\x1b[2K", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", erased)


def test_a_terminal_keeps_every_steps_row_with_one_completion():
    text = shown(terminal=True, steps=30)
    rows = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] == ["0.250"]]
    assert rows == [[str(step), "0.250"] for step in range(1, 31)]
    assert text.count("'What is 3 + 4? Reply.' -> '3 + 4 = 7' (0.6)") == 30
    assert text.count(" reward ") == 2  # the header, repeated after 20 rows


def test_columns_that_do_not_fit_a_narrow_terminal_are_left_out_whole():
    [header] = {line for line in shown(terminal=True, steps=1, width=40).splitlines() if "reward" in line}
    assert header.split() == ["step", "reward", "no", "signal", "loss", "grad"]


def test_a_log_names_each_phase_once_and_again_after_a_silence(monkeypatch):
    text = shown(terminal=False, steps=3)
    assert re.findall(r"^ +[0-9.]+ s  (.*)$", text, re.MULTILINE) == ["sample", "train"]
    assert [line.split("  ")[:2] for line in text.splitlines() if line.startswith("step")] == [
        [f"step {step}", "reward 0.250"] for step in (1, 2, 3)
    ]
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    assert shown(terminal=False, steps=3).count(" s  sample\n") == 3


def test_a_long_text_is_shortened_in_the_middle():
    assert shorten("a\n b", 10) == "a b"
    assert shorten("x" * 50 + "y" * 50, 23) == "x" * 10 + "..." + "y" * 10


@pytest.mark.parametrize(
    ("idle", "advice"),
    [
        ({"groups_without_signal": 1.0}, "sampler.samples_per_prompt"),
        ({"grad_norm": 0.0}, "lora.target_modules"),
    ],
)
def test_steps_that_learn_nothing_are_told_with_what_to_change(idle, advice):
    watch = StallWatch()
    told = [watch.look(row(step, **idle)) for step in range(1, 3 * PATIENCE)]
    due = [index + 1 for index, warning in enumerate(told) if warning]
    assert due == [PATIENCE, 2 * PATIENCE]
    assert advice in told[PATIENCE - 1]
    assert watch.look(row(50)) is None
    assert [watch.look(row(51, **idle)) is None for _ in range(PATIENCE)] == [True] * (PATIENCE - 1) + [False]


def test_a_rollouts_row_holds_the_prompt_the_reference_and_each_metric(tmp_path):
    ids = np.array([1, 2])
    prompt = Prompt("p-1", ({"role": "user", "content": "3 + 4?"},), {"answer": 7, "numbers": {3}})
    answer = Completion(ids, ids, np.zeros(2, np.float32), np.zeros(2, np.int64), "stop")
    verdict = Reward(1.0, {"correct": 1.0, "exact": 0.0})
    trajectory, prompts = Trajectory((answer,)), [EncodedPrompt(prompt, ids)]
    rollout = Rollout(prompts, [[trajectory]], [[["7"]]], [[verdict]], [[[0.0]]], [np.zeros(1)])
    rollout.write(tmp_path / "rollout.jsonl")
    [written] = [json.loads(line) for line in (tmp_path / "rollout.jsonl").read_text().splitlines()]
    assert written["messages"] == [{"role": "user", "content": "3 + 4?"}]
    assert written["reference"] == {"answer": 7, "numbers": "{3}"}
    assert written["metrics"] == {"correct": 1.0, "exact": 0.0}
    assert rollout.example() == ("3 + 4?", "7", 1.0)


def test_the_plot_has_a_panel_for_every_quantity(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = {}

    def look(figure, *args, **kwargs):
        drawn.update({axis.get_title(): [list(line.get_ydata()) for line in axis.lines] for axis in figure.axes})

    monkeypatch.setattr(Figure, "savefig", look)
    plot_run([row(1), row(2, grad_norm=0.4) | {"task/correct": 0.5}], tmp_path / "plot.png")
    assert drawn["gradient norm"] == [[0.3, 0.4]]
    assert drawn["reward"][0] == [0.25, 0.25]
    assert np.isnan(drawn["reward"][1][0])
    titles = {"reward", "loss", "gradient norm", "entropy", "length", "mismatch", "time per phase", "shares"}
    assert set(drawn) == titles
    evaluated = {0: {"a/reward": 0.1, "a/reward_low": 0.0, "a/reward_high": 0.3}, 2: {"a/reward": 0.2, "b/pass@4": 0.5}}
    drawn.clear()
    plot_run([row(1), row(2)], tmp_path / "plot.png", evaluated)
    assert set(drawn) - titles == {"evaluation: a", "evaluation: b"}
    assert list(drawn["evaluation: a"][0]) == [0.1, 0.2]


def test_the_summary_is_a_table_of_what_was_measured():
    summary = {
        "steps": 30, "reward_first": 0.1, "reward_last": 0.5, "seconds": 251.0,
        "eval_before": {"held_out/correct": 0.125, "held_out/truncated": 0.0},
        "eval_after": {"held_out/correct": 0.5, "held_out/correct_low": 0.25, "held_out/correct_high": 0.75},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    Screen(30, console).summary(summary)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    title = ["held_out/correct", "[95%],", "before", "->", "after"]
    assert [*title, "0.125", "0.500", "[0.250,", "0.750]"] in lines
    assert not [line for line in lines if "held_out/truncated" in line]
    assert ["reward,", "first", "steps", "->", "last", "steps", "0.100", "0.500"] in lines
    assert not [line for line in lines if "mismatch" in line]


def test_a_metric_whose_name_ends_like_a_limit_is_shown():
    after = {"a/too_low": 0.5, "a/too_low_low": 0.4, "a/too_low_high": 0.6}
    assert cells({"eval_after": after}) == {"a/too_low [95%]": ["0.500 [0.400, 0.600]"]}
