# SPDX-License-Identifier: Apache-2.0
"""Test the asynchronous loop with engines that answer in any order: bounds, resume, errors. Real ones: tests/e2e."""

import itertools
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config import parse_config
from megarl.controller import async_loop, loop
from megarl.controller.rollouts.buffer import GroupBuffer
from megarl.controller.rollouts.producer import seed_of
from megarl.errors import ConfigError, RewardError, WorkerError
from megarl.tasks.base import Reward
from megarl.types import Completion
from tests.helpers.prompts import number_stream

PROMPTS, BATCH, STEPS = 23, 4, 12


class Engines:
    """Two engines. A request ends after some looks, in random order; a part of its tokens is of the present version."""

    def __init__(self, slow: float, seed: int = 0) -> None:
        self.engines, self.watch = [None, None], SimpleNamespace(check=lambda: None)
        self.version, self.slow, self.random = 0, slow, random.Random(seed)
        self.requests, self.started, self.cancelled = {}, [], []
        self._count = itertools.count()

    def start(self, engine, prompt, seed):
        number = next(self._count)
        self.requests[number] = (engine, prompt, self.version)
        self.started.append((engine, int(prompt[0]), seed, self.version))
        return number

    def finished(self, engines, seconds):
        time.sleep(0.001)
        assert all(self.requests[number][0] == engine for number, engine in engines.items())
        done = [number for number in engines if self.random.random() > self.slow]
        return [(number, self._answer(*self.requests.pop(number)[1:])) for number in done]

    def _answer(self, prompt, begun):
        versions = np.array([begun, self.version, self.version])
        drawn = (np.array([5, 6, 0]), np.zeros(3, np.float32), versions, "stop")
        return [Completion(prompt, *drawn) for _ in range(2)]

    def cancel(self, references):
        self.cancelled += references


class Run:
    """A loop whose trainers take ``train_seconds`` a step and record what they train on."""

    def __init__(
        self,
        staleness=1,
        slow=0.7,
        stale="repeat",
        every=1,
        factor=3,
        train_seconds=0.004,
        generate_seconds=60.0,
        **loss,
    ):
        config = parse_config(
            {
                "model": {"path": "model"},
                "task": {"name": "arithmetic"},
                "loss": loss,
                "sampler": {"samples_per_prompt": 2, "generate_seconds": generate_seconds},
                "train": {
                    "prompts_per_step": BATCH,
                    "steps": STEPS,
                    "save_every": 1,
                    "max_staleness": staleness,
                    "stale_groups": stale,
                    "max_resample_factor": factor,
                },
                "checkpoint_engine": {"canary": False},
            }
        )
        self.trained, self.rows, self.saved = [], [], []
        self.engines = Engines(slow)

        def update(samples, rates):
            time.sleep(train_seconds)
            return {}

        def sync(version, kind):
            self.engines.version = version
            return SimpleNamespace(nbytes=0)

        def score(groups, check):
            return [Reward(float(i and int(prompt.id) % every == 0)) for prompt, g in groups for i in range(len(g))]

        self.state = loop.RunState(
            config=config,
            trainers=SimpleNamespace(watch=SimpleNamespace(check=None), update=update),
            samplers=self.engines,
            manager=SimpleNamespace(sync=sync),
            rewards=SimpleNamespace(score=score),
            stream=number_stream(PROMPTS),
            decode=lambda ids: "",
            recorder=SimpleNamespace(
                phase=lambda name: None,
                note=lambda report: None,
                write_rollout=lambda step, rollout: self.trained.append([p.place for p in rollout.prompts]),
                rollout_written=lambda: 0.0,
                step=self.rows.append,
                checkpoint=lambda trainers, step, kept: self.saved.append(json.loads(json.dumps(kept))),
            ),
        )

    def go(self):
        async_loop.run(self.state)
        return self

    @property
    def flat(self):
        return [place for batch in self.trained for place in batch]


def first_places(count):
    stream = number_stream(PROMPTS)
    return [prompt.place for _ in range(count) for prompt in stream.next(1)]


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_older_than_the_bound_and_no_prompt_is_trained_twice(staleness):
    run = Run(staleness).go()
    assert max(row["staleness_max"] for row in run.rows) <= staleness
    assert max(row["staleness_max"] for row in run.rows) > 0, "nothing overlapped"
    assert len(run.flat) == len(set(run.flat)) == STEPS * BATCH
    # No more was started than the last step needs, apart from prompts that were repeated.
    repeated = sum(row["repeated_groups"] for row in run.rows)
    assert len(run.engines.started) <= STEPS * BATCH + repeated
    assert set(run.flat) == set(first_places(STEPS * BATCH))


def test_both_engines_work_and_a_prompts_seed_is_that_of_its_place():
    run = Run(2).go()
    assert {engine for engine, *_ in run.engines.started} == {0, 1}
    seeds = {seed_of(0, place) for place in first_places(STEPS * BATCH)}
    assert len(seeds) == STEPS * BATCH and {seed for _, _, seed, _ in run.engines.started} == seeds


def test_groups_that_got_too_old_are_repeated_or_trained():
    repeated, trained = (Run(1, slow=0.93, stale=stale, train_seconds=0).go() for stale in ("repeat", "train"))
    assert sum(row["repeated_groups"] for row in repeated.rows) > 0
    assert max(row["staleness_max"] for row in repeated.rows) <= 1
    assert max(row["staleness_max"] for row in trained.rows) > 1
    assert sum(row["repeated_groups"] for row in trained.rows) == 0
    for run in (repeated, trained):
        assert len(run.flat) == len(set(run.flat)) == STEPS * BATCH


@pytest.mark.parametrize("step", [1, 5, STEPS - 1])
def test_after_a_resume_no_prompt_is_lost_or_trained_twice(step):
    first, second = Run(3), Run(3)
    first.go()
    saved = first.saved[step - 1]
    assert saved["step"] == step
    second.state.restore(saved)
    second.engines.version = saved["updates"]
    second.go()
    before = [place for batch in first.trained[:step] for place in batch]
    assert set(before) | set(second.flat) == set(first_places(STEPS * BATCH))
    assert len(before) + len(second.flat) == STEPS * BATCH
    # The prompts that were in the air are sent first.
    again = [tuple(place) for place in saved["stream"]["again"]]
    sent = [prompt for _, prompt, *_ in second.engines.started]
    assert sent[: len(again)] == [row for _, _, row in again]


def test_the_synchronous_loop_goes_on_from_an_asynchronous_checkpoint():
    run = Run(3)
    run.go()
    saved = run.saved[4]
    again = [tuple(place) for place in saved["stream"]["again"]]
    other = Run(3)
    other.state.restore(saved)
    drawn = [tuple(prompt.place) for prompt in other.state.stream.next(len(again) + 1)]
    assert again and drawn[:-1] == again and drawn[-1] not in again


def test_groups_without_signal_are_replaced():
    run = Run(2, every=3, factor=100, groups_without_signal="resample").go()
    assert sum(row["left_out_groups"] for row in run.rows) > 0
    assert all(row["groups_without_signal"] == 0 for row in run.rows)
    # Every group that was started is counted; those of the last step come after its row.
    left_out = sum(row["left_out_groups"] for row in run.rows)
    repeated = sum(row["repeated_groups"] for row in run.rows)
    assert len(run.engines.started) == STEPS * BATCH + left_out + repeated
    never = Run(2, every=10**6, groups_without_signal="resample").go()
    assert len(never.rows) == STEPS  # the factor bounds it
    assert all(row["left_out_groups"] <= 2 * BATCH for row in never.rows)


def test_rewards_of_several_prompts_are_computed_in_one_call():
    run, sizes = Run(3), []
    score = run.state.rewards.score

    def slow(groups, check):
        sizes.append(len(groups))
        time.sleep(0.01)
        return score(groups, check)

    run.state.rewards.score = slow
    run.go()
    assert max(sizes) > 1 and sum(sizes) == len(run.engines.started)
    assert set(run.flat) == set(first_places(STEPS * BATCH))


@pytest.mark.parametrize("where", ["pop", "remove"])
def test_ctrl_c_in_the_middle_of_taking_groups_loses_no_prompt(where):
    run = Run(1, slow=0.93, train_seconds=0)
    saved, interrupted = [], []

    def checkpoint(trainers, step, kept):
        saved.append(kept)

    run.state.recorder.checkpoint = checkpoint
    original = getattr(GroupBuffer, where)

    def interrupt(buffer, argument):
        result = original(buffer, argument)
        if run.state.step >= 3 and argument:
            interrupted.append(argument)
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupBuffer, where, interrupt)
        run.state.saved = -1
        with pytest.raises(KeyboardInterrupt):
            run.go()
    assert interrupted
    again = {tuple(place) for place in saved[-1]["stream"]["again"]}
    assert again | {tuple(place) for place in run.flat} == {tuple(p) for p in first_places(len(again) + len(run.flat))}


def test_errors_of_rewards_and_engines_end_the_run():
    run = Run(1)

    def fail(groups, check):
        raise RewardError("task.reward raised ValueError")

    run.state.rewards.score = fail
    with pytest.raises(RewardError, match="raised ValueError"):
        run.go()
    run = Run(1)

    def die(engines, seconds):
        raise WorkerError("sampler 1 died")

    run.engines.finished = die
    with pytest.raises(WorkerError, match="sampler 1 died"):
        run.go()


def test_an_engine_that_never_answers_ends_the_run():
    run = Run(1, slow=1.0, generate_seconds=0.1)
    with pytest.raises(WorkerError, match=r"did not answer prompt '\d+' within sampler.generate_seconds \(0.1 s\)"):
        run.go()
    assert sorted(run.engines.cancelled) == sorted(run.engines.requests)


@pytest.mark.parametrize(
    ("train", "loss", "message"),
    [
        ({"max_staleness": 1, "updates_per_step": 2}, {}, "less than train.updates_per_step"),
        ({"max_staleness": 1}, {"importance_cap": None}, "nothing would correct"),
        ({"max_staleness": 1, "max_mismatch": 0.1}, {}, "checkpoint_engine.canary compares"),
    ],
)
def test_settings_that_an_asynchronous_run_would_not_honour_are_refused(train, loss, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": {"path": "m"}, "task": {"name": "arithmetic"}, "train": train, "loss": loss})


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
    state.trainers.watch.check = lambda: None
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
