# SPDX-License-Identifier: Apache-2.0
"""The RL loop, readable top to bottom: sample, score, train, sync, record."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import RunConfig
from megarl.controller.actor_handles import SamplerGroup, TrainerGroup
from megarl.controller.data import EncodedPrompt, PromptStream
from megarl.controller.metrics import Recorder
from megarl.controller.rewards import RewardProcess
from megarl.controller.rollout import Decode, Rollout, score
from megarl.controller.schedule import learning_rate
from megarl.errors import MegarlError
from megarl.loss.advantages import group_advantages
from megarl.types import Completion


@dataclass
class RunState:
    """What the loop works with.

    Attributes:
        config: the run, resolved.
        trainers, samplers, manager: the actors and the weight path between them.
        rewards: the process that scores completions.
        stream, decode: prompts; response ids -> text.
        recorder: metrics, rollouts and checkpoints of the run folder.
        origin: ``settings`` and ``contents`` of the run, which a resume is compared with (``config.resume``).
        held_out: prompts to measure on before the first step and after the last.
        step: steps made so far.
        updates: optimizer steps made so far, which is the policy version.
        saved: step of the newest checkpoint.
    """

    config: RunConfig
    trainers: TrainerGroup
    samplers: SamplerGroup
    manager: CheckpointEngineManager
    rewards: RewardProcess
    stream: PromptStream
    decode: Decode
    recorder: Recorder
    origin: dict[str, Any] = field(default_factory=dict)
    held_out: list[EncodedPrompt] = field(default_factory=list)
    step: int = 0
    updates: int = 0
    saved: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of the controller."""
        return {"step": self.step, "updates": self.updates, "stream": self.stream.state(), "run": self.origin}

    def restore(self, state: dict[str, Any], *, other_data: bool = False) -> None:
        """Continue from a checkpoint's ``to_json``.

        Args:
            state: the checkpoint's.
            other_data: the prompts are others now, as was asked for: they begin with an epoch.
        """
        self.step, self.updates = state["step"], state["updates"]
        self.saved = self.step
        if other_data:
            self.stream.begin_epoch(state["stream"]["epoch"] + 1)
        else:
            self.stream.restore(state["stream"])


def run(state: RunState) -> None:
    """Train to ``train.steps``; the samplers need the weights of the start first."""
    first_sync(state)
    if state.step == 0:
        evaluate(state, "before")
    while state.step < state.config.train.steps:
        step(state)
        if state.step % state.config.train.save_every == 0 or state.step == state.config.train.steps:
            save(state, state.to_json())
    evaluate(state, "after")


def evaluate(state: RunState, when: Literal["before", "after"]) -> None:
    """Score completions of the held-out prompts by the current policy, if there are any."""
    if not state.held_out:
        return
    state.recorder.phase("held-out prompts")
    completions = state.samplers.generate([prompt.ids for prompt in state.held_out], state.updates)
    state.recorder.held_out(when, scored(state, state.held_out, completions))


def save(state: RunState, kept: dict[str, Any]) -> None:
    """Checkpoint the trainers' weights, which are those of ``kept``, a ``to_json``."""
    state.recorder.checkpoint(state.trainers, kept["step"], kept)
    state.saved = kept["step"]


@contextmanager
def saved_if_interrupted(state: RunState) -> Iterator[None]:
    """While the trainers are idle: Ctrl-C and SIGTERM lose no step that was made."""
    begun = state.to_json()  # its cursor is before the prompts that the block draws
    try:
        yield
    except KeyboardInterrupt:
        if state.step > state.saved:
            try:
                save(state, begun)
            except MegarlError as error:
                state.recorder.screen.say(f"step {state.step} could not be saved: {error}")
        raise


def first_sync(state: RunState) -> None:
    """Base weights, then the adapter, also at version 0: nothing is sampled before both are verified."""
    if state.config.checkpoint_engine.base_weights == "send":
        state.recorder.note(state.manager.sync(state.updates, "base"))
    state.recorder.note(state.manager.sync(state.updates, "adapter"))


def step(state: RunState) -> None:
    """One rollout, its updates, one sync."""
    train = state.config.train
    state.seconds = {}
    with saved_if_interrupted(state):
        rollout = collect(state)
    # Written while the trainers work: at 1,000 tokens a completion its JSON takes half a millisecond.
    state.recorder.write_rollout(state.step + 1, rollout)
    with timed(state, "train"):
        rates = [learning_rate(state.updates + i, train) for i in range(train.updates_per_step)]
        metrics = state.trainers.update(rollout.samples(), rates)
    check_mismatch(metrics, train.max_mismatch)
    state.updates += len(rates)
    with timed(state, "sync"):
        report = state.manager.sync(state.updates, "adapter")
    state.step += 1
    record(state, rollout, metrics | {"sync_bytes": float(report.nbytes)})


def collect(state: RunState) -> Rollout:
    """Completions of the next prompts by the current policy, scored. The trainers are idle meanwhile."""
    train = state.config.train
    with timed(state, "sample"):
        prompts = state.stream.next(train.prompts_per_step)
        state.stream.prepare(train.prompts_per_step)  # the next step's, while the samplers are at work
        completions = state.samplers.generate([prompt.ids for prompt in prompts], state.updates)
    with timed(state, "reward"):
        return scored(state, prompts, completions)


def scored(state: RunState, prompts: Sequence[EncodedPrompt], completions: Sequence[Sequence[Completion]]) -> Rollout:
    """Completions of the current policy with their rewards and advantages."""
    return score(
        prompts,
        completions,
        lambda pairs: state.rewards.score(pairs, state.trainers.watch.check),
        state.decode,
        lambda rewards: group_advantages(rewards, state.config.loss.advantage_scale),
        group=state.config.sampler.samples_per_prompt,
        version=state.updates,
    )


def check_mismatch(metrics: dict[str, float], limit: float | None) -> None:
    """Stop a run whose sampler and trainer do not compute the same policy.

    Raises:
        MegarlError: the step's mean |sampler - trainer| logprob difference exceeds ``train.max_mismatch``.
    """
    if limit is not None and not metrics["mismatch_mean"] <= limit:
        raise MegarlError(
            f"mean |sampler - trainer| logprob difference is {metrics['mismatch_mean']:.3g}, above train.max_mismatch "
            f"({limit}): sampler and trainer do not compute the same policy"
        )


def record(state: RunState, rollout: Rollout, metrics: dict[str, float]) -> None:
    """Write the step's metrics; its completions are written by now, or are waited for."""
    with timed(state, "record"):
        written = state.recorder.rollout_written()
    samples = rollout.samples()
    trained = sum(len(sample.tokens) - 1 for sample in samples)
    measured = rollout.metrics()
    row = {
        "step": state.step,
        "version": state.updates,
        **measured,
        **metrics,
        **{f"seconds/{name}": value for name, value in state.seconds.items()},
        "seconds": sum(state.seconds.values()),
        "rollout_write_seconds": written,
        "trained_tokens": float(trained),
        "train_tokens_per_second": trained / state.seconds["train"],
        "sample_tokens_per_second": measured["sampled_tokens"] / state.seconds["sample"],
    }
    state.recorder.step(row)


@contextmanager
def timed(state: RunState, phase: str) -> Iterator[None]:
    """Add a phase's wall seconds and show it as the current one."""
    state.recorder.phase(phase)
    start = time.perf_counter()
    yield
    state.seconds[phase] = state.seconds.get(phase, 0.0) + time.perf_counter() - start
