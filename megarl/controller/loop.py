# SPDX-License-Identifier: Apache-2.0
"""Run the RL loop, readable top to bottom: sample, score, train, sync, record."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from megarl.controller.ending import StepEnds, end_if_asked, until_the_step_ends
from megarl.controller.rollouts.comparison import with_trainer_logprobs
from megarl.controller.rollouts.data import EncodedPrompt, seed_of
from megarl.controller.rollouts.dynamic_sampling import draw_until_signal, dropped_groups
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.rewarding.judging import judge, rules_of, score
from megarl.controller.rollouts.rollout import Rollout
from megarl.controller.schedule import learning_rate
from megarl.controller.state import RunState
from megarl.controller.updates import run_updates
from megarl.errors import MegarlError, WeightSyncError


def run(state: RunState) -> None:
    """Train to ``train.steps``. Syncs first, since the samplers need the initial weights."""
    first_sync(state)
    first_evaluation(state)
    while state.step < state.config.train.steps:
        step(state)
        if state.step % state.config.train.save_every == 0 or state.step == state.config.train.steps:
            save(state, state.to_json())


def first_evaluation(state: RunState) -> None:
    """Evaluate the version that the run starts or resumes with, if that is due and has not been done."""
    if state.evaluation is None or state.step in state.recorder.evaluated():
        return
    if metrics := evaluate(state):
        state.recorder.track({"step": state.step, "version": state.updates, **metrics})


def evaluation_is_due(state: RunState) -> bool:
    """Return True if the current version is to be evaluated."""
    step, train = state.step, state.config.train
    due = step == 0 or step >= train.steps or (train.eval_every and step % train.eval_every == 0)
    return state.evaluation is not None and bool(due)


def evaluate(state: RunState) -> dict[str, float]:
    """Evaluate the current version if its step is due; return the metrics.

    Nothing is synced meanwhile, so the engines keep the version.
    """
    if state.evaluation is None or not evaluation_is_due(state):
        return {}
    with timed(state, "eval"):
        evaluated = state.evaluation.run(state.samplers, state.updates, state.samplers.look)
    return state.recorder.evaluation(state.step, state.updates, evaluated)


def finish(
    state: RunState, rollout: Rollout, metrics: dict[str, float], snapshot: Callable[[], dict[str, Any]]
) -> None:
    """Evaluate the version that a step made, if it is due, and record the step. A signal ends the run here."""
    try:
        end_if_asked(state)
        metrics = metrics | evaluate(state)
    except KeyboardInterrupt:
        record(state, rollout, metrics)
        with saved_if_interrupted(state, snapshot):
            raise
    record(state, rollout, metrics)


def save(state: RunState, kept: dict[str, Any]) -> None:
    """Save the trainers' weights together with ``kept``, the result of ``to_json`` for these weights."""
    state.recorder.checkpoint(state.trainers, kept["step"], kept)
    state.saved = kept["step"]


@contextmanager
def saved_if_interrupted(state: RunState, snapshot: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Save ``snapshot()`` if Ctrl-C or SIGTERM ends the block, which runs while the trainers are idle."""
    try:
        yield
    except KeyboardInterrupt:
        if not state.step:
            state.recorder.screen.say("no step has ended yet, so there is nothing to save")
        if state.step > state.saved:
            try:
                save(state, snapshot())
            except MegarlError as error:
                state.recorder.screen.say(f"step {state.step} could not be saved: {error}")
        raise


def first_sync(state: RunState) -> None:
    """Sync the base weights, then the policy, also at version 0. Nothing is sampled before both are verified."""
    state.recorder.phase("first sync")
    for report in state.recovery.first_sync():
        state.recorder.note(report)
    check_canary(state)


def sync(state: RunState) -> dict[str, float] | None:
    """Sync the trainers' version, and return the metrics.

    None: a signal ends the run while it waits for the only engine to start again. The step is done, and is saved.
    """
    with timed(state, "sync"):
        try:
            return state.recovery.sync().metrics()
        except StepEnds:
            return None


def check_canary(state: RunState) -> dict[str, float]:
    """Compare trainer and engines on a fixed sequence; see ``begin_canary``."""
    return begin_canary(state)()


def begin_canary(state: RunState) -> Callable[[], dict[str, float]]:
    """Ask trainer and engines for the logprobs of a fixed sequence.

    Returns:
        What waits for the engines, and returns the difference for the metrics. It may be called again. It raises
        ``WeightSyncError`` as ``Canary.check``; no engine generates from then on.
    """
    canary, version = state.canary, state.updates
    if canary is None:
        return dict
    with timed(state, "canary"):
        scored = state.samplers.start_score(canary.tokens, version)
        trainer = state.trainers.score(canary.tokens, state.config.checkpoint_engine.timeout_seconds)

    @cache
    def check() -> dict[str, float]:
        with timed(state, "canary"):
            try:
                return {"canary": canary.check(version, trainer, scored())}
            except WeightSyncError as error:
                state.manager.refuse(str(error))
                raise

    return check


def step(state: RunState) -> None:
    """Do one step: a rollout, its updates, a sync."""
    train = state.config.train
    state.seconds = {}
    begun = state.to_json()  # taken before prompts are drawn, so that its cursor is before them
    with saved_if_interrupted(state, lambda: begun):
        rollout = collect(state)
    with until_the_step_ends(state):
        with engines_asleep(state):
            keep_completions(state, rollout)
            with timed(state, "train"):
                rates = [learning_rate(state.updates + i, train) for i in range(train.updates_per_step)]
                metrics = run_updates(state.trainers, state.config, rollout.samples(), rates)
        state.gradients.check(metrics)
        check_mismatch(metrics, train.max_mismatch)
        state.updates += len(rates)
        if (synced := sync(state)) is not None:
            metrics |= check_canary(state) | synced
        state.step += 1
    finish(state, rollout, metrics, state.to_json)


def keep_completions(state: RunState, rollout: Rollout) -> None:
    """Write the next step's completions, with the trainer's logprobs of ``train.compare_completions`` of them.

    They are written in the background, while the trainers work: per completion of 1,000 tokens, writing JSON takes half
    a millisecond.
    """
    if count := state.config.train.compare_completions:
        with timed(state, "compare"):
            rollout = with_trainer_logprobs(rollout, count, state.trainers.forward)
    state.recorder.write_rollout(state.step + 1, rollout, state.decode)


@contextmanager
def engines_asleep(state: RunState) -> Iterator[None]:
    """Let the engines sleep during the block if ``sampler.sleep`` says so. If it fails, ``Recovery`` wakes them."""
    if not state.config.sampler.sleep:
        yield
        return
    with timed(state, "sleep"):
        state.samplers.sleep()
    yield
    with timed(state, "wake"):
        state.trainers.release_memory()
        state.samplers.wake()


def collect(state: RunState) -> Rollout:
    """Sample completions of the step's prompts from the current policy, and score them; the trainers are idle."""
    train = state.config.train
    if state.config.loss.groups_without_signal == "resample":
        return draw_until_signal(partial(draw, state), train.prompts_per_step, train.max_resample_factor)
    return draw(state, train.prompts_per_step)


def draw(state: RunState, count: int) -> Rollout:
    """Sample and score completions of the next ``count`` prompts of the stream."""
    with timed(state, "sample"):
        prompts = state.stream.next(count)
        # Encodes prompts that come next, most often the next step's, while the samplers work.
        state.stream.prepare(state.config.train.prompts_per_step)
        answers: Sequence[Any]
        if state.episodes:
            answers = state.episodes.play(prompts, state.updates)
        else:
            seeds = [seed_of(state.config.sampler.seed, prompt.place) for prompt in prompts if prompt.place]
            answers = state.samplers.generate([prompt.ids for prompt in prompts], state.updates, seeds)
    with timed(state, "reward"):
        return scored(state, prompts, answers)


def scored(
    state: RunState,
    prompts: Sequence[EncodedPrompt],
    answers: Sequence[Any],
    *,
    any_version: bool = False,
) -> Rollout:
    """Score answers: return them with their rewards and advantages.

    Args:
        state: the run's state.
        prompts: the prompts, as sent.
        answers: of each prompt: completions, or episodes that were played.
        any_version: False refuses tokens of another version than the current one.
    """
    rules, version = rules_of(state.config), None if any_version else state.updates
    process = state.judge
    if isinstance(process, EpisodeProcess):
        return judge(prompts, answers, rules, version=version)
    return score(
        prompts,
        answers,
        lambda groups: process.score(groups, state.trainers.check),
        state.decode,
        rules,
        group=state.config.sampler.samples_per_prompt,
        version=version,
    )


def check_mismatch(metrics: dict[str, float], limit: float | None) -> None:
    """Stop a run whose sampler and trainer do not compute the same policy.

    Raises:
        MegarlError: the step's mean |sampler - trainer| logprob difference exceeds ``train.max_mismatch``.
    """
    # Absent from a step whose completions are all masked: nothing was trained on.
    if limit is not None and "mismatch_mean" in metrics and not metrics["mismatch_mean"] <= limit:
        raise MegarlError(
            f"mean |sampler - trainer| logprob difference is {metrics['mismatch_mean']:.3g}, above train.max_mismatch "
            f"({limit}): sampler and trainer do not compute the same policy"
        )


def record(state: RunState, rollout: Rollout, metrics: dict[str, float]) -> None:
    """Write the step's metrics, after its completions have been written."""
    with timed(state, "record"):
        written = state.recorder.rollout_written()
    dropped = dropped_groups(rollout, state.config)
    trained = sum(len(sample.tokens) - 1 for sample in rollout.samples() if sample.group not in dropped)
    measured = rollout.metrics()
    asynchronous = state.config.train.max_staleness > 0
    seconds = sum(state.seconds.values())
    row = {
        "step": state.step,
        "version": state.updates,
        **measured,
        "drawn_prompts": float(len(rollout.prompts)),
        "dropped_groups": float(len(dropped)),
        **metrics,
        **state.recovery.metrics(),
        **{f"seconds/{name}": value for name, value in state.seconds.items()},
        "seconds": seconds,
        "rollout_write_seconds": written,
        "trained_tokens": float(trained),
        "train_tokens_per_second": trained / state.seconds["train"],
        "sample_tokens_per_second": measured["sampled_tokens"] / (seconds if asynchronous else state.seconds["sample"]),
    }
    state.recorder.step(row)


@contextmanager
def timed(state: RunState, phase: str) -> Iterator[None]:
    """Measure the wall seconds of a phase, and show it as the current one."""
    state.recorder.phase(phase)
    start = time.perf_counter()
    yield
    state.seconds[phase] = state.seconds.get(phase, 0.0) + time.perf_counter() - start
