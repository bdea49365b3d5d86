# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs that the worker keeps with those that vLLM itself returns, of the very same draws."""

import asyncio
from typing import Any

import numpy as np

from megarl.config.sections.eval import Sampling
from megarl.sampler.drawing.fetched_logprobs import _own_logprobs
from tests.e2e.sampler_rig import Rig, prompts

# Requests whose logprobs vLLM returns; at each step one of them must run.
OTHERS = 4


def both_ways(rig: Rig, version: int, sampling: Sampling | None = None, count: int = 24) -> dict[str, Any]:
    """Sample with kept logprobs while another request of the engine has vLLM return them: a step then has both."""
    requests = rig.sampler._requests
    last, fetched, outputs = requests._last, requests.fetched.of, {}
    kept: dict[str, list[np.ndarray]] = {}

    async def keep_output(stream: Any) -> Any:
        output = await last(stream)
        outputs[output.request_id] = output
        return output

    async def keep_answer(request: str, drawn: Any) -> list[np.ndarray]:
        kept[request] = await fetched(request, drawn)
        return kept[request]

    async def run() -> list:
        from vllm import SamplingParams

        longest = rig.config.sampler.max_response_tokens
        first = asyncio.Event()

        async def keep_running(number: int) -> None:
            tokens = max(longest // (1 + number), 1)  # so that they never end together
            while not done.is_set():
                other = SamplingParams(logprobs=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                stream = rig.sampler._link.engine().generate({"prompt_token_ids": [5]}, other, f"other-{number}")
                async for _ in stream:
                    first.set()
                number, tokens = number + OTHERS, longest

        done = asyncio.Event()
        others = [asyncio.ensure_future(keep_running(number)) for number in range(OTHERS)]
        await first.wait()
        try:
            return await rig.sampler.generate(prompts(count), version, list(range(count)), sampling)
        finally:
            done.set()
            await asyncio.gather(*others)

    requests._last, requests.fetched.of = keep_output, keep_answer
    try:
        rig.call(run())
    finally:
        del requests._last, requests.fetched.of
    # In a step without any of the others vLLM returns none.
    whole = {name: out.outputs for name, out in outputs.items() if all(map(_is_whole, out.outputs))}
    own = {name: [_own_logprobs(one) for one in drawn] for name, drawn in whole.items()}
    pairs = [pair for name in own for pair in zip(kept[name], own[name], strict=True)]
    return {
        "source": requests.fetched.source,
        "samples": len(pairs),
        "tokens": sum(len(one) for one, _ in pairs),
        "equal": all(np.array_equal(one.view(np.int32), other.view(np.int32)) for one, other in pairs),
        "left": rig.call(rig.sampler._link.rpc("megarl_counts"))[0][0],
    }


def _is_whole(output: Any) -> bool:
    return len(output.logprobs) == len(output.token_ids)


def shared_prefill(rig: Rig, version: int, length: int, count: int = 8) -> dict[str, int]:
    """Count the prompt tokens that are computed for several samples of prompts that are new to the engine."""
    drawn = np.random.default_rng(99).integers(10, 300, (count, length))
    before = rig.call(rig.sampler._link.rpc("megarl_counts"))[0]
    groups = rig.generate(list(drawn), version)
    after = rig.call(rig.sampler._link.rpc("megarl_counts"))[0]
    return {
        "samples": sum(map(len, groups)),
        "prompt_tokens": after[1] - before[1],
        "computed": after[2] - before[2],
    }
