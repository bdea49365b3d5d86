# SPDX-License-Identifier: Apache-2.0
"""Config section ``eval``: the sets of prompts that a run is evaluated on."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from megarl.config.base import Section
from megarl.config.sections.sampler import SamplerConfig
from megarl.config.sections.task import TaskConfig
from megarl.errors import ConfigError

# Name of the set that ``task.held_out`` makes.
HELD_OUT = "held_out"
MOST_SAMPLES = 1024
METRIC = re.compile(r"(pass|maj)@([1-9][0-9]{0,3})", re.ASCII)
LABEL = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
# Fields that say where the prompts of a set come from and how they are scored.
SOURCE = ("path", "reward", "reward_weights", "options", "limit", "system_prompt", "chat_template_kwargs")


class Metric(NamedTuple):
    """A metric of several completions: ``pass@4`` is ``("pass", 4)``."""

    kind: str
    k: int


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of an evaluation.

    Attributes:
        samples: completions of each prompt.
        temperature: 0 is greedy.
        top_p: draws come from the most probable tokens that have this probability together.
        max_tokens: most tokens of a completion.
    """

    samples: int
    temperature: float
    top_p: float
    max_tokens: int


class EvalTaskConfig(Section):
    name: str
    """A registered task, ``file.py:build``, or ``held_out``: the prompts of ``task.held_out``."""
    label: Annotated[str, Field(min_length=1)] | None = None
    """Name in the metrics (``eval/LABEL/reward``). Default: ``name``."""
    path: str | None = None
    """As ``task.path``: the rows of this set."""
    options: dict[str, Any] = Field(default_factory=dict)
    """As ``task.options``."""
    reward: str | None = None
    """As ``task.reward``."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """As ``task.reward_weights``."""
    system_prompt: str | None = None
    """As ``task.system_prompt``. Default: that one; an empty text is none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As ``task.chat_template_kwargs``. Default: those."""
    limit: int | None = Field(None, ge=1)
    """Use only the first prompts. Default: all."""
    samples: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    """Completions of each prompt. Default: ``sampler.samples_per_prompt``."""
    temperature: float | None = Field(None, ge=0.0)
    """Sampling temperature; 0 is greedy, with 1 sample. Default: ``sampler.temperature``."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Draw from the most probable tokens that have this probability together."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Most tokens of a completion. Default: ``sampler.max_response_tokens``; it may be more than that."""
    metrics: list[str] = Field(default_factory=list)
    """Further metrics: ``pass@K`` and ``maj@K``, K at most ``samples``. The mean reward and the means of the task's own
    metrics are always measured."""
    right: str = "correct"
    """The task's metric that is 1 for a right completion, for ``pass@K`` and ``maj@K``; ``reward``: a reward of at
    least 1 is right."""

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, names: list[str]) -> list[str]:
        for name in names:
            if not METRIC.fullmatch(name):
                raise ValueError(
                    f"'{name}' is not a metric; known are pass@K and maj@K (such as pass@4), beside the mean reward "
                    "and the task's own metrics, which are always measured"
                )
        return names

    @property
    def key(self) -> str:
        """The label, which is by default the task's name without its file."""
        return self.label or self.name.rpartition(":")[2]

    def wanted(self) -> dict[str, Metric]:
        """Return the metrics that ``metrics`` names."""
        matches = {name: METRIC.fullmatch(name) for name in self.metrics}
        return {name: Metric(match[1], int(match[2])) for name, match in matches.items() if match}

    def sampling(self, sampler: SamplerConfig) -> Sampling:
        """Return how completions are drawn; what this section leaves open is as in training."""
        return Sampling(
            samples=sampler.samples_per_prompt if self.samples is None else self.samples,
            temperature=sampler.temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            max_tokens=sampler.max_response_tokens if self.max_response_tokens is None else self.max_response_tokens,
        )

    def task(self, run: TaskConfig) -> TaskConfig:
        """Return the ``task`` section of this set; what it leaves open is as in the run's."""
        prompt = run.system_prompt if self.system_prompt is None else self.system_prompt or None
        template = run.chat_template_kwargs if self.chat_template_kwargs is None else self.chat_template_kwargs
        fields = {name: getattr(self, name) for name in ("name", "path", "options", "reward", "reward_weights")}
        return run.model_copy(
            update=fields | {"system_prompt": prompt, "chat_template_kwargs": template, "held_out": 0}
        )


class EvalConfig(Section):
    tasks: list[EvalTaskConfig] = Field(default_factory=list)
    """Sets of prompts to evaluate on, before the first step, after the last and every ``train.eval_every`` steps. What
    a set asks is never trained on. ``task.held_out`` adds a set ``held_out`` unless one of that name is here."""


def check_eval(sets: list[EvalTaskConfig], task: TaskConfig, sampler: SamplerConfig, every: int | None) -> None:
    """Check the sets of a run.

    Args:
        sets: ``RunConfig.evaluations``.
        task, sampler: sections of the run.
        every: ``train.eval_every``.

    Raises:
        ConfigError: a set has no prompts, a metric needs more samples, or a name is taken twice.
    """
    if every is not None and not sets:
        raise ConfigError(
            f"train.eval_every is {every}, but there is nothing to evaluate on; set eval.tasks or task.held_out"
        )
    seen: set[str] = set()
    for index, one in enumerate(sets):
        entry = f"eval.tasks[{index}]"
        if not LABEL.fullmatch(one.key):
            raise ConfigError(f"{entry}: '{one.key}' cannot be part of a metric's name; set label to letters or digits")
        if one.key in seen:
            raise ConfigError(f"{entry}: another set is called '{one.key}' too; give one of them a label")
        seen.add(one.key)
        if one.name == HELD_OUT:
            _check_held_out(one, entry, task)
        _check_samples(one, entry, one.sampling(sampler))


def _check_held_out(one: EvalTaskConfig, entry: str, task: TaskConfig) -> None:
    if not task.held_out:
        raise ConfigError(f"{entry} is '{HELD_OUT}', but task.held_out is 0: the set has no prompts; hold some out")
    for name in SOURCE:
        if getattr(one, name) != type(one).model_fields[name].get_default(call_default_factory=True):
            raise ConfigError(f"{entry}.{name} is set, but the prompts of '{HELD_OUT}' are the task's own; remove it")


def _check_samples(one: EvalTaskConfig, entry: str, sampling: Sampling) -> None:
    for name, (_, k) in one.wanted().items():
        if k > sampling.samples:
            raise ConfigError(
                f"{entry}.metrics asks for {name}, but each prompt has {sampling.samples} completions; set "
                f"{entry}.samples to at least {k}"
            )
    if sampling.temperature == 0 and sampling.samples > 1:
        raise ConfigError(
            f"{entry}: temperature is 0 with {sampling.samples} samples, which would all be the same; set samples to 1"
        )
