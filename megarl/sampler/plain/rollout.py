# SPDX-License-Identifier: Apache-2.0
"""Time completions of ``vllm.LLM`` without anything of megarl. The peer of `megarl bench rollout`.

``python -m megarl.sampler.plain.rollout SETTINGS`` prints the result as the last line, in JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.sampler.environment import prepare_environment
from megarl.sampler.plain.engine import run_json
from megarl.sampler.plain.rates import Load, rates


def time_plain_rollouts(settings: dict[str, Any], log: Path) -> dict[str, Any]:
    """Start ``vllm.LLM`` in a process of its own and time its completions.

    Args:
        settings: ``arguments`` of ``LLM``; ``adapter``, a PEFT folder, or None for an engine without LoRA;
            ``sampling``, arguments of ``SamplingParams``; ``load``, the fields of ``Load``.
        log: file for what vLLM prints.

    Returns:
        ``start_seconds``, and ``rates``: weights -> logprobs (``"vllm"``, ``"none"``) -> tokens/s by concurrency.

    Raises:
        WorkerError: vLLM failed.
    """
    return run_json("megarl.sampler.plain.rollout", [json.dumps(settings)], log)


def main(settings: dict[str, Any]) -> None:
    """Time every combination of weights, logprobs and concurrency."""
    prepare_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # vLLM's own default
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    began = time.perf_counter()
    engine = LLM(**settings["arguments"])
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "rates": {}}

    def way(adapter: Any, logprobs: int | None) -> Callable[[list[np.ndarray]], int]:
        parameters = SamplingParams(**settings["sampling"], logprobs=logprobs, detokenize=False)

        def sample(prompts: list[np.ndarray]) -> int:
            asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
            outputs = engine.generate(asked, parameters, use_tqdm=False, lora_request=adapter)
            return sum(len(one.token_ids) for output in outputs for one in output.outputs)

        return sample

    adapter = LoRARequest("adapter", 1, settings["adapter"]) if settings["adapter"] else None
    for weights, lora in {"adapter": adapter, "base": None}.items() if adapter else (("merged", None),):
        ways = {"vllm": way(lora, 0), "none": way(lora, None)}
        result["rates"][weights] = rates(Load(**settings["load"]), ways)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
