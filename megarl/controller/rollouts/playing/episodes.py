# SPDX-License-Identifier: Apache-2.0
"""Play the episodes of a run on its engines, for both loops."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from megarl.config import RunConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.actors.dispatch import Home
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.rollouts.data import EncodedPrompt, seed_of
from megarl.controller.rollouts.playing.episode_process import Ask, EpisodeProcess
from megarl.environments.episode import Played
from megarl.errors import ConfigError
from megarl.futures import finished
from megarl.types import Completion


class Turns(Protocol):
    """A source of turns: the engines of a run, or one engine."""

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, home: Home | None = None
    ) -> "Future[Completion]":
        """Start to draw one turn of an episode; see ``VllmSampler.turn``."""
        ...


class Episodes:
    """The episodes of a run; for a ``Producer`` what a ``SamplerGroup`` is for completions of one turn.

    All episodes of a prompt run on one engine, so that they share its cache of prefixes.

    Attributes:
        process: plays them.
        look: of the samplers.
    """

    def __init__(self, process: EpisodeProcess, samplers: SamplerGroup, config: RunConfig) -> None:
        """
        Args:
            process: plays the episodes.
            samplers: the engines.
            config: the run's config.

        Raises:
            ConfigError: ``sampler.reproducible`` is true.
        """
        if config.sampler.reproducible:
            raise ConfigError(
                f"sampler.reproducible is true, but task.name '{config.task.name}' is an environment: timing decides "
                "which turns of its episodes are decoded together; set it to false"
            )
        self.process, self._samplers, self._seed = process, samplers, config.sampler.seed
        section = config.sampler
        self._sampling = Sampling(section.samples_per_prompt, section.temperature, 1.0, section.max_response_tokens)

    @property
    def look(self) -> Callable[[], None]:
        """See ``SamplerGroup``."""
        return self._samplers.look

    def play(self, prompts: Sequence[EncodedPrompt], version: int) -> list[list[Played]]:
        """Play episodes under one policy version, spread over the engines.

        Args:
            prompts: P, of the stream.
            version: the policy version that must draw every token.

        Returns:
            ``[P][G]``.
        """
        asks = [self._ask(version) for _ in prompts]
        seeds = [seed_of(self._seed, prompt.place) for prompt in prompts if prompt.place is not None]
        return self.process.play(prompts, asks, seeds, self._sampling, self.look)

    def start(self, prompt: EncodedPrompt, seed: int) -> "Future[list[Played]]":
        """Start the episodes of one prompt, each token under whichever version is current."""
        return self.process.start(prompt, self._ask(None), seed, self._sampling)

    def finished(
        self, futures: "Sequence[Future[list[Played]]]", seconds: float
    ) -> "list[tuple[Future[list[Played]], list[Played]]]":
        """Return the groups that are done; see ``SamplerGroup.finished``."""
        self.process.check_time()
        return finished(futures, seconds)

    def cancel(self, references: "Sequence[Future[list[Played]]]") -> None:
        """Cancel episodes that nobody waits for any more."""
        self.process.cancel(references)

    def _ask(self, version: int | None) -> Ask:
        return partial(ask_engine, self._samplers, version, Home())


def ask_engine(
    sampler: Turns, version: int | None, home: Home, ids: np.ndarray, seed: int, sampling: Sampling
) -> "Future[Completion]":
    """Ask an engine for a turn; see ``VllmSampler.turn``."""
    return sampler.turn(ids, seed, version, sampling, home)
