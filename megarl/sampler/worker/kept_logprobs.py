# SPDX-License-Identifier: Apache-2.0
"""Keep the drawn tokens' logprobs in vLLM's worker until their request ends, instead of sending them token by token.

vLLM's own way makes Python objects for each token, in the engine's process and in the front end: 30 to 40% of a
rollout's time. Here vLLM's sampler computes the logprobs as for ``SamplingParams(logprobs=0)``, and copies them to the
host as it copies the drawn tokens, without waiting for the device. They are then taken out of the step's output, and
one call fetches those of many requests that have ended (``fetched_logprobs``).

Tested with vLLM 0.26 (CUDA, second model runner) and 0.32 (CPU). ``refusal`` says why an engine must use vLLM's way.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import vllm
from vllm.v1.outputs import AsyncModelRunnerOutput

from megarl.sampler.drawing.fetched_logprobs import KEY, pack

TESTED = ("0.26", "0.32")


def refusal(vllm_config: Any) -> str | None:
    """Return why an engine's logprobs cannot be kept in its worker; None if they can."""
    if not vllm.__version__.startswith(tuple(f"{release}." for release in TESTED)):
        return f"vLLM {vllm.__version__} is not among the releases that it is tested with ({', '.join(TESTED)})"
    if vllm_config.speculative_config is not None:
        return "speculative decoding draws several tokens in a step"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "the engine is pipeline parallel"
    return None


class KeptLogprobs:
    """The drawn tokens of running requests, and their logprobs, on the host.

    Args:
        requests: number of requests that there is room for at first.
        longest: most tokens of a request.
    """

    def __init__(self, requests: int, longest: int) -> None:
        # Pages of memory are taken only when they are written to.
        self._ids: np.ndarray = np.empty((requests, longest), np.int32)
        self._logprobs: np.ndarray = np.empty((requests, longest), np.float32)
        self._counts: np.ndarray = np.zeros(requests, np.int64)
        self._free = list(range(requests))
        self._row_of: dict[str, int] = {}  # vLLM's request id -> row
        self._members: dict[str, dict[int, str]] = {}  # request id -> sample -> vLLM's request id
        self._last: tuple[Sequence[str], np.ndarray] = ((), np.empty(0, np.int64))
        # vLLM may take a step's output in another thread than the one that begins the next step.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._row_of)

    def begin(self, inner: str, request: str) -> bool:
        """Expect tokens of a request; return False if it goes on, after it was preempted.

        Args:
            inner: vLLM's id: the request's own, with its sample's number before it if it has several, and a random end.
            request: the id that the request was sent with.
        """
        with self._lock:
            if inner in self._row_of:
                return False
            before, found, _ = inner.partition(request)
            if not found:
                raise RuntimeError(f"vLLM's request '{inner}' does not contain its own id '{request}'")
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._counts[row] = 0
            self._row_of[inner] = row
            self._members.setdefault(request, {})[int(before.rstrip("_") or 0)] = inner
            self._last = ((), self._last[1])
            return True

    def add(self, inner: Sequence[str], drawn: Sequence[Sequence[int]], logprobs: Any) -> None:
        """Append a step's tokens.

        Args:
            inner: vLLM's ids of the step's requests.
            drawn: the tokens of each, one or none.
            logprobs: vLLM's ``LogprobsLists``; the first column belongs to the drawn token.
        """
        with self._lock:
            if inner != self._last[0]:
                rows = np.fromiter((self._row_of.get(name, -1) for name in inner), np.int64, len(inner))
                self._last = (inner, rows)
            rows = self._last[1]
            came = np.fromiter(map(len, drawn), np.int64, len(drawn))
            if (came > 1).any():
                raise RuntimeError("vLLM drew several tokens of a request in one step")
            chosen = np.flatnonzero((came == 1) & (rows >= 0))
            places = rows[chosen], self._counts[rows[chosen]]
            self._ids[places] = logprobs.logprob_token_ids[chosen, 0]
            self._logprobs[places] = logprobs.logprobs[chosen, 0]
            self._counts[places[0]] += 1

    def take(self, requests: Sequence[str], dropped: Sequence[str]) -> bytes:
        """Return all tokens of requests that have ended, packed, and forget them.

        Args:
            requests: ids that the requests were sent with.
            dropped: ids of requests to forget only.
        """
        with self._lock:
            taken = []
            for request in requests:
                for sample, inner in sorted(self._members.get(request, {}).items()):
                    row = self._row_of[inner]
                    count = self._counts[row]
                    taken.append((request, sample, self._ids[row, :count], self._logprobs[row, :count]))
            answer = pack(taken)
            for request in (*requests, *dropped):
                for inner in self._members.pop(request, {}).values():
                    self._free.append(self._row_of.pop(inner))
            self._last = ((), self._last[1])
            return answer

    def _grow(self) -> None:
        """Double the number of requests that there is room for."""
        rows = len(self._counts)
        used = self._counts.max(initial=0)
        for name in ("_ids", "_logprobs", "_counts"):
            old = getattr(self, name)
            new = np.empty((2 * rows, *old.shape[1:]), old.dtype)
            new[(slice(rows), slice(used))[: old.ndim]] = old[(slice(rows), slice(used))[: old.ndim]]
            setattr(self, name, new)
        self._counts[rows:] = 0
        self._free = list(range(rows, 2 * rows))


class Runner:
    """Sits on vLLM's model runner: takes the logprobs of its requests out of every step's output.

    Args:
        runner: either model runner of vLLM; its methods are replaced.
        requests, longest: as for ``KeptLogprobs``.

    Attributes:
        prompt_tokens, computed_prompt_tokens: tokens of the prompts of all samples, and those that were not in the
            prefix cache.
    """

    def __init__(self, runner: Any, requests: int, longest: int) -> None:
        self.kept = KeptLogprobs(requests, longest)
        self.prompt_tokens = self.computed_prompt_tokens = 0
        self._others: set[str] = set()  # running requests whose logprobs vLLM itself returns
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def _execute_model(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            sampling = new.sampling_params
            if sampling is not None and sampling.logprobs is not None:
                request = (sampling.extra_args or {}).get(KEY)
                if request is None:
                    self._others.add(new.req_id)
                elif self.kept.begin(new.req_id, request):
                    self.prompt_tokens += len(new.prompt_token_ids)
                    self.computed_prompt_tokens += len(new.prompt_token_ids) - new.num_computed_tokens
        if self._others:
            self._others -= scheduler_output.finished_req_ids
        return self._execute(scheduler_output, *arguments, **options)

    def _sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        output = self._sample(*arguments, **options)
        if isinstance(output, AsyncModelRunnerOutput):
            return Output(output, self)
        return self.without_logprobs(output)

    def without_logprobs(self, output: Any) -> Any:
        """Take the logprobs out of a step's output, a ``ModelRunnerOutput`` or None; return it."""
        logprobs = getattr(output, "logprobs", None)
        if logprobs is not None:
            self.kept.add(output.req_ids, output.sampled_token_ids, logprobs)
            if not self._others:
                output.logprobs = None
        return output


class Output(AsyncModelRunnerOutput):
    """A step's output that is still being copied to the host."""

    def __init__(self, output: AsyncModelRunnerOutput, runner: Runner) -> None:
        self._output, self._runner = output, runner

    def get_output(self) -> Any:
        """Wait for the copy; return vLLM's ``ModelRunnerOutput`` without logprobs."""
        return self._runner.without_logprobs(self._output.get_output())
