# SPDX-License-Identifier: Apache-2.0
"""Call all engines together as one sampler."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np

from megarl.config import SamplerConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.actors.calls import Limit, wait_all
from megarl.controller.actors.dispatch import Dispatcher, Home
from megarl.controller.actors.engine_handle import EngineHandle
from megarl.controller.actors.pulse import Watch
from megarl.errors import WorkerError
from megarl.futures import finished, results
from megarl.types import Completion

LOOK_SECONDS = 0.5
# An engine gets this many times the sequences that it decodes at once: a prompt's samples end one by one.
AHEAD = 2


class SamplerGroup:
    """All engines together as one sampler. Each prompt goes to the engine with the least to do.

    Args:
        engines: the engine actors, in the order of their indices.
        watch: tells which participants are alive.
        config: the ``sampler`` section.

    Attributes:
        engines: their handles.
        dispatcher: holds the requests.
        look: called now and then by those that wait in the main thread while the trainers are idle; what it raises
            ends the wait.
    """

    def __init__(self, engines: Sequence[Any], watch: Watch, config: SamplerConfig) -> None:
        self.engines = [
            EngineHandle(actor, index, config.parallel.tensor, watch) for index, actor in enumerate(engines)
        ]
        self.watch, self._limit = watch, Limit("sampler.generate_seconds", config.generate_seconds)
        self._samples, self._reproducible = config.samples_per_prompt, config.reproducible
        self.dispatcher = Dispatcher(self.engines, watch, config.generate_seconds, AHEAD * config.max_num_seqs)
        self.look: Callable[[], None] = self.dispatcher.check

    def generate(
        self, prompts: Sequence[np.ndarray], version: int, seeds: Sequence[int], sampling: Sampling | None = None
    ) -> list[list[Completion]]:
        """Spread prompts over the engines; return the completions of each prompt, in the order of the prompts.

        Args:
            prompts: ``[P]`` int64 token ids each.
            version: the policy version that must sample every token.
            seeds: of each prompt, 31 bits.
            sampling: how an evaluation draws; None: as in training.
        """
        weight = sampling.samples if sampling else self._samples
        with self._as_one_batch(weight * len(prompts)):
            futures = [
                self.dispatcher.submit("sample", ids, seed, version, sampling, weight=weight)
                for ids, seed in zip(prompts, seeds, strict=True)
            ]
        try:
            return results(futures, LOOK_SECONDS, self.look)
        except BaseException:
            self.dispatcher.cancel(futures)
            raise

    @contextmanager
    def _as_one_batch(self, sequences: int) -> Iterator[None]:
        """With ``sampler.reproducible`` let the engine begin what is submitted in the block when it has all of it."""
        held = [one for one in self.engines if one.lost is None and not one.closed] if self._reproducible else []
        self._each({one: one.actor.hold.remote() for one in held})
        yield
        self._each({one: one.actor.release.remote(sequences) for one in held if one.lost is None})

    def start(self, prompt: Any, seed: int) -> "Future[list[Completion]]":
        """Start to sample one prompt under whichever version is current.

        Args:
            prompt: has the token ids ``[P]`` as ``ids``.
            seed: 31 bits.
        """
        return self.dispatcher.submit("sample", prompt.ids, seed, weight=self._samples)

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, home: Home | None = None
    ) -> "Future[Completion]":
        """Start to draw one turn of an episode on the engine of its prompt; see ``VllmSampler.turn``."""
        return self.dispatcher.submit("turn", prompt, seed, version, sampling, home=home or Home())

    def finished(
        self, futures: "Sequence[Future[list[Completion]]]", seconds: float
    ) -> "list[tuple[Future[list[Completion]], list[Completion]]]":
        """Return those that are done, with their completions; wait at most ``seconds`` for the first.

        Raises:
            MegarlError: what the engine raised.
        """
        return finished(futures, seconds)

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        """Cancel requests that nobody waits for any more."""
        self.dispatcher.cancel(futures)

    def score(self, tokens: np.ndarray, version: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Return engines' logprobs of a sequence; see ``start_score``."""
        return self.start_score(tokens, version, names)()

    def start_score(
        self, tokens: np.ndarray, version: int, names: Sequence[str] | None = None
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Ask engines for the logprobs of a sequence; see ``VllmSampler.score``.

        Args:
            tokens, version: the sequence, and the version that must be resident.
            names: of the engines; default: all that are open.

        Returns:
            What waits for the answers: name -> float32 ``[T - 1]``. An engine that died is lost, and left out.
        """
        chosen = [
            engine
            for engine in self.engines
            if (engine.name in names if names is not None else engine.lost is None and not engine.closed)
        ]
        calls = [(engine, engine.actor, engine.actor.score.remote(tokens, version)) for engine in chosen]
        # An engine that was started again meanwhile was not asked.
        return lambda: self._each({engine: call for engine, actor, call in calls if engine.actor is actor})

    def sleep(self) -> int:
        """Let all engines give their GPU memory back until ``wake``; return the bytes that became free."""
        return sum(self._each({one: one.actor.sleep.remote() for one in self.engines if one.lost is None}).values())

    def wake(self) -> None:
        """Let all engines take their memory back. One that is awake, or was started meanwhile, stays as it is."""
        self._each({one: one.actor.wake.remote() for one in self.engines if one.lost is None})

    def _each(self, calls: dict[EngineHandle, Any]) -> dict[str, Any]:
        """Wait for one call of each engine; return name -> result. An engine that died is lost, and left out."""
        answers = {}
        for engine, reference in calls.items():
            try:
                [answers[engine.name]] = wait_all({engine.name: reference}, self.watch, self._limit)
            except WorkerError as error:
                self.dispatcher.lose(engine, error)
        return answers

    def close(self, seconds: float) -> None:
        """Stop all engines. Raises ``WorkerError`` if that takes longer than ``seconds``."""
        self.dispatcher.close()
        calls = {engine.name: engine.actor.close.remote() for engine in self.engines if engine.lost is None}
        wait_all(calls, self.watch, Limit("the time to stop", seconds))
