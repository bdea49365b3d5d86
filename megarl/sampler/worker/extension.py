# SPDX-License-Identifier: Apache-2.0
"""Extend vLLM's workers by what megarl's engines need: weights that are received, logprobs that are kept.

vLLM imports it in its workers by ``worker_extension_cls``.
"""

import os

from vllm.platforms import current_platform

from megarl.checkpoint_engine.receiver.extension import ReceiverExtension
from megarl.checkpoint_engine.receiver.sleep import SleepExtension
from megarl.sampler.environment import NUMERICS
from megarl.sampler.worker import lora_graphs
from megarl.sampler.worker.answers import AnswerExtension
from megarl.sampler.worker.kept_logprobs import Runner, refusal

# vLLM imports this module before it builds the model.
if current_platform.is_cuda():
    lora_graphs.install()
if os.environ.get(NUMERICS) == "bitwise":
    from megarl.sampler.worker import bitwise_hooks

    bitwise_hooks.install()


class EngineExtension(AnswerExtension, ReceiverExtension, SleepExtension):
    """Mixed into vLLM's ``Worker``. Its methods are called with ``collective_rpc``, between two steps."""

    _megarl_logprobs: Runner | None

    def megarl_keep_logprobs(self) -> str:
        """Keep the logprobs of requests that ask for it. Returns why that is impossible, or nothing."""
        self._megarl_logprobs = None
        reason = refusal(self.vllm_config)
        if reason:
            return reason
        if self.rank == 0:  # the rank whose outputs vLLM takes
            requests = 2 * self.vllm_config.scheduler_config.max_num_seqs
            self._megarl_logprobs = Runner(self.model_runner, requests, self.vllm_config.model_config.max_model_len)
        return ""

    def megarl_take_logprobs(self, requests: list[str], dropped: list[str]) -> bytes:
        """See ``KeptLogprobs.take``; nothing on ranks that keep none."""
        return b"" if self._megarl_logprobs is None else self._megarl_logprobs.kept.take(requests, dropped)

    def megarl_counts(self) -> list[int]:
        """Return numbers of requests whose logprobs are kept, of all requests' prompt tokens, and of those computed."""
        runner = self._megarl_logprobs
        return [0, 0, 0] if runner is None else [len(runner.kept), runner.prompt_tokens, runner.computed_prompt_tokens]
