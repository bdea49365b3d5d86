# SPDX-License-Identifier: Apache-2.0
"""Measure what adapter and merged weights cost while sampling, and say which pays for which steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.bench.syncing.settings import SyncBenchSettings
from megarl.sampler.plain.rates import Load, count_tokens, rates
from megarl.sampler.process import SamplerProcess

SAMPLES, PROMPT_TOKENS, ROUNDS = 8, 64, 2
# Sampled tokens of the steps in the table.
STEPS = (30_000, 300_000, 3_000_000)


def sampler_settings(settings: SyncBenchSettings) -> dict[str, Any]:
    """Return the ``sampler`` settings of an engine whose rate is measured."""
    return {
        "samples_per_prompt": SAMPLES,
        "max_prompt_tokens": PROMPT_TOKENS,
        "max_response_tokens": settings.response_tokens,
        "max_num_seqs": settings.concurrency,
    }


def decode_rate(settings: SyncBenchSettings, engines: Sequence[SamplerProcess], version: int, vocabulary: int) -> float:
    """Return tokens per second of all engines together, under the version that they have, on random prompts.

    Each of them samples ``settings.concurrency`` completions at once, at the same time as the others.
    """

    def sample(prompts: list[np.ndarray]) -> int:
        parts = [prompts[number :: len(engines)] for number in range(len(engines))]
        started = [engine.start_generate(part, version) for engine, part in zip(engines, parts, strict=True)]
        return sum(count_tokens(one.result()) for one in started)

    together = settings.concurrency * len(engines)
    load = Load([together], SAMPLES, PROMPT_TOKENS, vocabulary, settings.response_tokens, ROUNDS, settings.seed)
    return rates(load, {"engines": sample})["engines"][0]


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines that compare the contents: seconds of sync and sampling for some sizes of a step, and which pays.

    Args:
        rows: of the contents that were measured, with ``kind``, ``ms``, ``tokens_per_second`` and the mean difference
            of logprobs.
    """
    measured = [row for row in rows if "tokens_per_second" in row]
    lines = [
        f"{row['kind']}: {row['ms']:.1f} ms a sync, {row['tokens_per_second']:,.0f} tokens/s, |logprob| of sampler and "
        f"trainer differ by {row['logprob_difference_mean']:.1e} in the mean"
        for row in measured
    ]
    for tokens in STEPS if measured else ():
        each = {row["kind"]: row["ms"] / 1e3 + tokens / row["tokens_per_second"] for row in measured}
        listed = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in each.items())
        lines.append(f"a step of {tokens:,} sampled tokens: {listed}; use {min(each, key=lambda kind: each[kind])}")
    if (even := break_even(measured)) is not None:
        lines.append(f"both cost the same at {even:,.0f} sampled tokens a step")
    return lines


def break_even(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the sampled tokens of a step at which two contents cost the same; None if one is always the better."""
    if len(rows) != 2:
        return None
    first, second = rows
    slower = 1 / first["tokens_per_second"] - 1 / second["tokens_per_second"]
    saved = (second["ms"] - first["ms"]) / 1e3
    return saved / slower if slower and saved / slower > 0 else None
