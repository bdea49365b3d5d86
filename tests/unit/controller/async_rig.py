# SPDX-License-Identifier: Apache-2.0
"""Run the asynchronous loop with engines that answer in any order, and with trainers that record what they get."""

import itertools
import json
import random
import time
from types import SimpleNamespace

import numpy as np

from megarl.checkpoint_engine.phases import SyncReport
from megarl.config import parse_config
from megarl.controller import async_loop
from megarl.controller.canary import Canary
from megarl.controller.state import RunState
from megarl.tasks.base import Reward
from megarl.types import Completion
from tests.helpers.prompts import number_stream

PROMPTS, BATCH, STEPS = 23, 4, 12


class Engines:
    """Engines. A request ends after some looks, in random order; a part of its tokens is of the present version."""

    def __init__(self, slow: float, seed: int = 0) -> None:
        self.engines, self.look = [], lambda: None
        self.dispatcher = SimpleNamespace(sent_again=lambda: 0)
        self.version, self.slow, self.random = 0, slow, random.Random(seed)
        self.requests, self.started, self.cancelled = {}, [], []
        self._count = itertools.count()

    def start(self, prompt, seed):
        number = next(self._count)
        self.requests[number] = (prompt.ids, self.version)
        self.started.append((int(prompt.ids[0]), seed, self.version))
        return number

    def finished(self, numbers, seconds):
        time.sleep(0.001)
        done = [number for number in numbers if self.random.random() > self.slow]
        return [(number, self._answer(*self.requests.pop(number))) for number in done]

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
        **loss,
    ):
        config = parse_config(
            {
                "model": {"path": "model"},
                "task": {"name": "arithmetic"},
                "loss": loss,
                "sampler": {"samples_per_prompt": 2},
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
        self.trained, self.rows, self.saved, self.events = [], [], [], []
        self.engines = Engines(slow)

        def optim_step(rate):
            self.events.append("train")
            time.sleep(train_seconds)
            return {}

        def sync(version, kind):
            self.engines.version = version
            return SyncReport(version, kind, 0, 0, "")

        def score(groups, check):
            return [Reward(float(i and int(prompt.id) % every == 0)) for prompt, g in groups for i in range(len(g))]

        self.state = RunState(
            config=config,
            trainers=SimpleNamespace(
                check=None, forward=self.forward, forward_backward=lambda samples: None, optim_step=optim_step
            ),
            samplers=self.engines,
            manager=SimpleNamespace(sync=sync, present=["sampler 0"], stale={}),
            judge=SimpleNamespace(score=score),
            stream=number_stream(PROMPTS),
            decode=lambda ids: "",
            recorder=SimpleNamespace(
                phase=lambda name: None,
                note=lambda report: None,
                write_rollout=lambda step, rollout, decode: self.trained.append([p.place for p in rollout.prompts]),
                rollout_written=lambda: 0.0,
                step=self.record,
                checkpoint=lambda trainers, step, kept: self.saved.append(json.loads(json.dumps(kept))),
            ),
            staff=SimpleNamespace(restarts={"engine": 0, "trainer": 0}),
        )

    def record(self, row):
        self.events.append("record")
        self.rows.append(row)

    def with_canary(self, wrong=None):
        """Let engines answer a canary when they are waited for; they disagree about version ``wrong``."""

        def start_score(tokens, version):
            self.events.append(f"ask {version}")

            def answer():
                self.events.append(f"answer {version}")
                return {"sampler 0": np.full(3, float(version == wrong))}

            return answer

        self.state.canary = Canary("float32", np.arange(4))
        self.state.trainers.score = lambda tokens, seconds: np.zeros(3)
        self.state.samplers.start_score = start_score
        self.state.manager.refuse = self.events.append
        return self

    def forward(self, samples):
        """Return what the trainer would."""
        return [np.full(int(sample.response_mask.sum()), -1.0) for sample in samples]

    def go(self):
        async_loop.run(self.state)
        return self

    @property
    def flat(self):
        return [place for batch in self.trained for place in batch]


def first_places(count):
    stream = number_stream(PROMPTS)
    return [prompt.place for _ in range(count) for prompt in stream.next(1)]
