# SPDX-License-Identifier: Apache-2.0
"""Test evaluations within the asynchronous loop: of one version, resumed, interrupted."""

import time
from types import SimpleNamespace

import pytest

from tests.unit.controller.async_rig import STEPS, Run


def evaluated(run, done=(), every=5):
    """Evaluate a run; return the evaluated (step, version) pairs, and those that trackers get apart from rows."""
    seen, tracked, state = [], [], run.state
    train = state.config.train.model_copy(update={"eval_every": every})
    state.config = state.config.model_copy(update={"train": train})
    state.recorder.evaluated = lambda: {step: {} for step in done}
    state.recorder.track = tracked.append
    state.recorder.evaluation = lambda step, version, found: seen.append((step, version)) or {"eval/a/reward": found}

    def evaluate(samplers, version, look):
        held = run.engines.version
        time.sleep(0.02)
        assert held == run.engines.version == version, "a sync came meanwhile"
        return float(version)

    state.evaluation = SimpleNamespace(run=evaluate)
    return seen, tracked


def test_an_evaluation_is_of_one_version_and_its_numbers_are_in_the_row_of_its_step():
    run = Run(2)
    seen, tracked = evaluated(run)
    run.go()
    assert seen == [(0, 0), (5, 5), (10, 10), (STEPS, STEPS)]
    assert tracked == [{"step": 0, "version": 0, "eval/a/reward": 0.0}]
    rows = {row["step"]: row["eval/a/reward"] for row in run.rows if "eval/a/reward" in row}
    assert rows == {5: 5.0, 10: 10.0, 12: 12.0}
    assert all(("seconds/eval" in row) == (row["step"] in rows) for row in run.rows)


@pytest.mark.parametrize(("done", "expected"), [((0, 5), [(10, 10), (12, 12)]), ((0,), [(5, 5), (10, 10), (12, 12)])])
def test_a_resumed_run_evaluates_what_was_interrupted_and_nothing_twice(done, expected):
    run = Run(1)
    seen, _ = evaluated(run, done)
    run.state.step = run.state.updates = run.state.saved = run.engines.version = 5
    run.go()
    assert seen == expected


def test_ctrl_c_in_an_evaluation_keeps_the_step():
    run = Run(1)
    evaluated(run)
    saved = []
    run.state.recorder.checkpoint = lambda trainers, step, kept: saved.append((step, kept))
    evaluate = run.state.evaluation.run

    def interrupt(samplers, version, look):
        if version == 5:
            raise KeyboardInterrupt
        return evaluate(samplers, version, look)

    run.state.evaluation.run = interrupt
    run.state.config = run.state.config.model_copy(
        update={"train": run.state.config.train.model_copy(update={"save_every": 100})}
    )
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    [(step, kept)] = saved
    assert (step, kept["updates"]) == (5, 5)
    again = {tuple(place) for place in kept["stream"]["again"]}
    assert not again & {tuple(place) for place in run.flat}
