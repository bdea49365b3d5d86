# SPDX-License-Identifier: Apache-2.0
"""Define the whole config tree, and run the checks that need more than one section."""

import math

from pydantic import Field, model_validator

from megarl.config.base import Section
from megarl.config.cross_sections import (
    check_overlong,
    check_reproducible,
    check_sections,
    check_share_base,
    check_sleep,
    check_staleness,
)
from megarl.config.engine import EngineConfig
from megarl.config.sections.checkpoint_engine import CheckpointEngineConfig
from megarl.config.sections.eval import HELD_OUT, EvalConfig, EvalTaskConfig, check_eval
from megarl.config.sections.lora import LoraConfig
from megarl.config.sections.loss import LossConfig
from megarl.config.sections.model import ModelConfig
from megarl.config.sections.parallel import ParallelConfig
from megarl.config.sections.sampler import SamplerConfig
from megarl.config.sections.task import TaskConfig
from megarl.config.sections.train import TrainConfig
from megarl.config.trainer import TrainerConfig


class RunConfig(Section):
    """The config of a run, for trainer and sampler. The fields are documented in each section.

    Creating one reads no file; ``megarl.config.check_run`` compares it with the model.
    """

    model: ModelConfig
    task: TaskConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    checkpoint_engine: CheckpointEngineConfig = Field(default_factory=CheckpointEngineConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @property
    def evaluations(self) -> list[EvalTaskConfig]:
        """The sets that the run is evaluated on: ``eval.tasks``, and the held-out prompts."""
        named = any(one.name == HELD_OUT for one in self.eval.tasks)
        return [*self.eval.tasks, *([EvalTaskConfig(name=HELD_OUT)] if self.task.held_out and not named else [])]

    @property
    def longest_response(self) -> int:
        """Most tokens of a completion, in training or in an evaluation."""
        lengths = [one.sampling(self.sampler).max_tokens for one in self.evaluations]
        return max([self.sampler.max_response_tokens, *lengths])

    @property
    def trainer(self) -> TrainerConfig:
        """Return the settings that the trained model needs."""
        longest = self.sampler.max_prompt_tokens + self.sampler.max_response_tokens
        parallel = self.parallel
        if parallel.response_share is None:
            parallel = parallel.model_copy(update={"response_share": self.sampler.max_response_tokens / longest})
        return TrainerConfig(self.model, parallel, self.lora, self.train, self.sampler.temperature, longest)

    @property
    def most_prompts(self) -> int:
        """Most prompts that training samples at the same time."""
        return self.train.prompts_per_step * (self.train.max_staleness // self.train.updates_per_step + 1)

    @property
    def engine(self) -> EngineConfig:
        """Settings of one sampler engine."""
        # Engines share the prompts by load, hence unevenly. An evaluation asks for all of its rows at once.
        share = math.ceil(self.most_prompts / self.sampler.engines) + (self.sampler.engines > 1)
        most = None if self.evaluations else share * self.sampler.samples_per_prompt
        sections = (self.model, self.lora, self.sampler, self.checkpoint_engine)
        return EngineConfig(*sections, self.train.device, self.longest_response, most)

    @model_validator(mode="after")
    def _cross_check(self) -> "RunConfig":
        check_sections(self.parallel, self.sampler, self.train)
        check_overlong(self.loss, self.sampler)
        check_staleness(self.train, self.loss)
        check_sleep(self.train, self.sampler)
        check_share_base(self.parallel, self.sampler, self.train, self.checkpoint_engine)
        check_reproducible(self.train, self.sampler)
        check_eval(self.evaluations, self.task, self.sampler, self.train.eval_every)
        return self
