# SPDX-License-Identifier: Apache-2.0
"""Run the asynchronous RL loop (``train.max_staleness`` > 0): the engines sample while the trainer trains.

A producer samples and scores groups ahead of the trainer. Each token's behaviour logprob is the one that it was drawn
with, and its version is known; ``loss.importance_cap`` corrects for the versions in between.

Busy engines answer the canary late, so the loop goes on meanwhile. It waits for the answer before it trains on tokens
of that version, or evaluates it.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from megarl.controller.ending import until_the_step_ends
from megarl.controller.loop import (
    begin_canary,
    evaluation_is_due,
    finish,
    first_evaluation,
    first_sync,
    keep_completions,
    save,
    saved_if_interrupted,
    scored,
    sync,
    timed,
)
from megarl.controller.rollouts.buffer import ScoredGroup
from megarl.controller.rollouts.producer import Producer
from megarl.controller.rollouts.rollout import Rollout
from megarl.controller.schedule import learning_rate
from megarl.controller.state import RunState
from megarl.controller.updates import run_updates

# Waits for a version's canary, and returns its metrics.
Check = Callable[[], dict[str, float]]


def run(state: RunState) -> None:
    """Train to ``train.steps``. Syncs first, since the samplers need the initial weights."""
    first_sync(state)
    first_evaluation(state)
    score = partial(scored, state, any_version=True)
    with Producer(
        state.config, state.episodes or state.samplers, state.stream, score, step=state.step, version=state.updates
    ) as producer:
        checked: Check = dict
        while state.step < state.config.train.steps:
            checked = step(state, producer, checked)
            if state.step % state.config.train.save_every == 0 or state.step == state.config.train.steps:
                save(state, snapshot(state, producer))


def step(state: RunState, producer: Producer, checked: Check) -> Check:
    """Do one step: take the oldest complete groups, train, sync while the engines go on.

    Args:
        state: the run's state.
        producer: samples groups.
        checked: waits for the canary of the present version; see ``begin_canary``.

    Returns:
        The same of the next version. The last version's canary has been waited for.
    """
    train = state.config.train
    state.seconds = {}
    with saved_if_interrupted(state, partial(snapshot, state, producer)), timed(state, "sample"):
        groups = producer.take()
    with until_the_step_ends(state):
        rollout = reduce(Rollout.with_more, [group.rollout for group in groups])
        measured = checked() | staleness(groups, state.updates) | producer.fill()
        keep_completions(state, rollout)
        with timed(state, "train"):
            rates = [learning_rate(state.updates + i, train) for i in range(train.updates_per_step)]
            metrics = run_updates(state.trainers, state.config, rollout.samples(), rates)
        state.gradients.check(metrics)
        state.updates += len(rates)
        synced = sync(state)
        checking: Check = dict if synced is None else begin_canary(state)
        metrics |= measured | (synced or {})
        state.step += 1
        metrics |= producer.advance(state.step, state.updates)
        if state.step == train.steps or evaluation_is_due(state):
            metrics |= checking()
    finish(state, rollout, metrics, partial(snapshot, state, producer))
    return checking


def snapshot(state: RunState, producer: Producer) -> dict[str, Any]:
    """Return the controller's part of a checkpoint: prompts that are not trained on yet come again after a resume."""
    return state.to_json(producer.stream_state())


def staleness(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Compute by how many versions the tokens of a batch are older than ``version``; ``staleness/AGE`` are shares."""
    ages = version - np.concatenate([one.versions for group in groups for one in group.rollout.trajectories[0]])
    if not len(ages):
        return {}
    shares = {f"staleness/{age}": float(np.mean(ages == age)) for age in range(int(ages.max()) + 1)}
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max()), **shares}
