# SPDX-License-Identifier: Apache-2.0
"""Measure tokens per second of several ways to sample, in turn, on fresh random prompts. No vLLM."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.types import Completion


@dataclass(frozen=True)
class Load:
    """Describes the completions that an engine is asked for.

    Attributes:
        concurrency: numbers of completions that are asked for at once, each a multiple of ``samples``.
        samples: completions of each prompt.
        prompt_tokens: tokens of a prompt, drawn below ``vocabulary``.
        response_tokens: most tokens of a completion.
        rounds: timed rounds, after a call that is not.
        seed: of the prompts.
    """

    concurrency: list[int]
    samples: int
    prompt_tokens: int
    vocabulary: int
    response_tokens: int
    rounds: int
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.response_tokens


def count_tokens(groups: Sequence[Sequence[Completion]]) -> int:
    """Return the tokens that were sampled for several prompts."""
    return sum(len(one.response_ids) for group in groups for one in group)


def rates(load: Load, ways: Mapping[str, Callable[[list[np.ndarray]], int]]) -> dict[str, list[float]]:
    """Return tokens/s of each way by concurrency, over all timed rounds. The ways take turns in each round.

    Args:
        load: what is asked for.
        ways: name -> function that samples ``load.samples`` completions of each prompt (int64 ``[P]``) at once, and
            returns the number of their tokens.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for concurrency in load.concurrency:
        tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
        for number in range(load.rounds + 1):
            # Only the first call at a size may have to compile something.
            for index, (name, sample) in enumerate(list(ways.items())[: None if number else 1]):
                # Never the same prompts again: their keys and values would be in the prefix cache.
                draw = np.random.default_rng((load.seed, concurrency, number, index))
                shape = (concurrency // load.samples, load.prompt_tokens)
                prompts = list(draw.integers(0, load.vocabulary, shape))
                began = time.perf_counter()
                drawn = sample(prompts)
                if number:
                    tokens[name] += drawn
                    seconds[name] += time.perf_counter() - began
        for name in ways:
            found[name].append(tokens[name] / seconds[name])
    return found
