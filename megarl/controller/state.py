# SPDX-License-Identifier: Apache-2.0
"""Hold the state of a run, and the objects that the loops work with."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import RunConfig
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.canary import Canary
from megarl.controller.gradients import GradientCheck
from megarl.controller.recording.metrics import Recorder
from megarl.controller.recovery import Recovery, Staff
from megarl.controller.rollouts.data import PromptStream
from megarl.controller.rollouts.evaluation import Evaluation
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.playing.episodes import Episodes
from megarl.controller.rollouts.rewarding.judges import Judge
from megarl.controller.rollouts.rewarding.judging import Decode


@dataclass
class RunState:
    """The state of the loop, and the objects that it works with.

    Attributes:
        config: the run's config, resolved.
        trainers, samplers, manager: the actors, and the manager of weight syncs between them.
        judge: the process that scores completions, or plays the episodes of an environment.
        stream, decode: the prompts; function: response ids -> text.
        recorder: writes the metrics, rollouts and checkpoints of the run folder.
        staff: starts lost engines and ranks again.
        canary: compares trainer and engines after each sync, or None.
        origin: ``settings`` and ``contents`` of the run. A resume is compared with them (``config.resume``).
        evaluation: evaluates a version; None if there is nothing to evaluate on.
        step: steps done so far.
        updates: optimizer steps done so far; this is the policy version.
        saved: step of the newest checkpoint.
        ending: the signal that ends the run after the present step; empty without one.
        start: ``to_json`` of the run's beginning.
        recovery: what to do about lost engines and ranks.
    """

    config: RunConfig
    trainers: TrainerGroup
    samplers: SamplerGroup
    manager: CheckpointEngineManager
    judge: Judge
    stream: PromptStream
    decode: Decode
    recorder: Recorder
    staff: Staff
    canary: Canary | None = None
    origin: dict[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    step: int = 0
    updates: int = 0
    saved: int = 0
    ending: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = self.to_json()
        self.recovery = Recovery(self, self.staff)

    @cached_property
    def episodes(self) -> Episodes | None:
        """Plays the episodes of an environment on the engines; None for a task of one turn."""
        judge = self.judge
        return Episodes(judge, self.samplers, self.config) if isinstance(judge, EpisodeProcess) else None

    @cached_property
    def gradients(self) -> GradientCheck:
        """Stops a run in which a part of the adapter gets no gradient."""
        return GradientCheck(self.trainers, self.recorder, self.config.train.require_gradients)

    def to_json(self, stream: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the controller's part of a checkpoint, with another state of the stream if given."""
        stream = self.stream.state() if stream is None else stream
        return {"step": self.step, "updates": self.updates, "stream": stream, "run": self.origin}

    def restore(self, state: dict[str, Any], *, other_data: bool = False) -> None:
        """Restore the result of a checkpoint's ``to_json``.

        Args:
            state: that result.
            other_data: True if the prompts have changed, as the user asked: the run continues with a new epoch.
        """
        self.step, self.updates = state["step"], state["updates"]
        self.saved = self.step
        if other_data:
            self.stream.begin_epoch(state["stream"]["epoch"] + 1)
        else:
            self.stream.restore(state["stream"])
