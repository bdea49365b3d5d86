# SPDX-License-Identifier: Apache-2.0
"""Test the asynchronous loop with engines that answer in any order: bounds, resume, errors. Real ones: tests/e2e."""

import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config import parse_config
from megarl.controller.rollouts.buffer import GroupBuffer, check_memory
from megarl.controller.rollouts.data import seed_of
from megarl.errors import ConfigError, RewardError, WeightSyncError, WorkerError
from megarl.launch import run as launch
from megarl.types import Completion
from tests.unit.controller.async_rig import BATCH, STEPS, Run, first_places


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


def test_a_prompts_seed_is_that_of_its_place():
    run = Run(2).go()
    seeds = {seed_of(0, place) for place in first_places(STEPS * BATCH)}
    assert len(seeds) == STEPS * BATCH and {seed for _, seed, _ in run.engines.started} == seeds


def test_groups_that_got_too_old_are_repeated_or_trained():
    repeated, trained = (Run(1, slow=0.93, stale=stale, train_seconds=0).go() for stale in ("repeat", "train"))
    assert sum(row["repeated_groups"] for row in repeated.rows) > 0
    assert max(row["staleness_max"] for row in repeated.rows) <= 1
    assert max(row["staleness_max"] for row in trained.rows) > 1
    assert sum(row["repeated_groups"] for row in trained.rows) == 0
    assert sum(row["stale_groups"] for row in trained.rows) > 0 == sum(row["stale_groups"] for row in repeated.rows)
    for row in (*repeated.rows, *trained.rows):
        ages = [row.get(f"staleness/{age}", 0.0) for age in range(int(row["staleness_max"]) + 1)]
        assert sum(ages) == pytest.approx(1.0) and ages[-1] > 0
        assert np.dot(ages, range(len(ages))) == pytest.approx(row["staleness_mean"])
        assert row["buffered_groups"] >= 0 and row["running_groups"] >= 0
    assert max(row["buffered_groups"] + row["running_groups"] for row in repeated.rows) > 0
    for run in (repeated, trained):
        assert len(run.flat) == len(set(run.flat)) == STEPS * BATCH


def test_a_canary_is_waited_for_when_its_versions_tokens_are_trained_on():
    run = Run(2).with_canary().go()
    expected = ["ask 0", "answer 0"]
    for version in range(1, STEPS + 1):
        # The first version's was answered before anything was sampled.
        expected += [f"answer {version - 1}"] * (version > 1) + ["train", f"ask {version}"]
        expected += [f"answer {version}"] * (version == STEPS) + ["record"]
    assert run.events == expected
    assert ["canary" in row for row in run.rows] == [False, *[True] * (STEPS - 1)]


@pytest.mark.parametrize("wrong", [0, 3, STEPS])
def test_nothing_is_trained_on_after_a_canary_that_failed(wrong):
    run = Run(2).with_canary(wrong)
    with pytest.raises(WeightSyncError, match=f"canary: sampler 0 and the trainer differ .* version {wrong}"):
        run.go()
    assert run.events.count("train") == wrong and "canary" in run.events[-1]


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
    sent = [prompt for prompt, *_ in second.engines.started]
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
    score = run.state.judge.score

    def slow(groups, check):
        sizes.append(len(groups))
        time.sleep(0.01)
        return score(groups, check)

    run.state.judge.score = slow
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


@pytest.mark.parametrize("no_engine", [False, True], ids=["", "while no engine is there to sync to"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_sigterm_while_the_trainers_work_ends_the_run_after_the_step_with_a_checkpoint(staleness, no_engine):
    """A second one, of Slurm or the launcher, changes nothing; a step that fails meanwhile is not started again."""
    run, said = Run(staleness, train_seconds=0), []
    run.state.recorder.screen = SimpleNamespace(say=lambda text, style=None: said.append(text))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}

    def optim_step(rate):
        if run.state.step == 4:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            run.state.manager.present = [] if no_engine else run.state.manager.present
        return {}

    run.state.trainers.optim_step = optim_step
    try:
        with pytest.raises(KeyboardInterrupt, match="signal SIGTERM"):
            run.go()
        assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5] and run.saved[-1]["step"] == 5
        assert said == ["signal SIGTERM: the run ends after this step, which is saved first (Ctrl-C: now)"]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]

        def fail(rate):
            raise WorkerError("a rank died")

        run.state.trainers.optim_step = fail
        with pytest.raises(KeyboardInterrupt, match="signal SIGTERM"):
            run.go()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_errors_of_rewards_and_engines_end_the_run():
    run = Run(1)

    def fail(groups, check):
        raise RewardError("task.reward raised ValueError")

    run.state.judge.score = fail
    with pytest.raises(RewardError, match="raised ValueError"):
        run.go()
    run = Run(1)

    def die(numbers, seconds):
        raise WorkerError("sampler 1 died")

    run.engines.finished = die
    with pytest.raises(WorkerError, match="sampler 1 died"):
        run.go()


def test_requests_that_still_run_are_cancelled():
    run = Run(1, slow=1.0)

    def end():
        raise WorkerError("over")

    run.state.samplers.look = end
    with pytest.raises(WorkerError, match="over"):
        run.go()
    assert run.engines.requests and sorted(run.engines.cancelled) == sorted(run.engines.requests)


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


@pytest.mark.parametrize(("staleness", "updates", "batches"), [(0, 1, 1), (3, 1, 4), (4, 2, 3)])
def test_a_buffer_that_may_not_fit_into_memory_is_refused_before_anything_starts(staleness, updates, batches):
    config = Run(3).state.config
    train = config.train.model_copy(
        update={"max_staleness": staleness, "updates_per_step": updates, "prompts_per_step": 64}
    )
    sampler = config.sampler.model_copy(update={"samples_per_prompt": 16, "max_response_tokens": 2**20})
    config = config.model_copy(update={"train": train, "sampler": sampler})
    # Full of completions: what their arrays take, and a letter of text for each token.
    one = Completion(*(np.zeros(2**10, kind) for kind in (np.int64, np.int64, np.float32, np.int64)), "stop")
    each = one.response_ids.nbytes + one.logprobs.nbytes + one.versions.nbytes + 2**10
    full = batches * 64 * 16 * 2**10 * each
    check_memory(config, full)
    with pytest.raises(ConfigError, match=rf"{batches * 64} groups .*max_staleness {staleness}.* GiB .*lower one"):
        check_memory(config, full - 1)


def test_the_memory_of_this_host_is_what_counts(monkeypatch, tmp_path):
    config = Run(3).state.config
    for name in ("check_run", "check_names", "prepare_task"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    for name in ("with_absolute_paths", "find_run"):
        monkeypatch.setattr(launch, name, lambda config, *_: config)
    monkeypatch.setattr(launch.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(ConfigError, match=r"this host has 0\.0 GiB of memory free"):
        launch.train(config, tmp_path)
