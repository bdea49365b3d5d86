# SPDX-License-Identifier: Apache-2.0
"""Format the table of `megarl bench rollout`."""

from typing import Any

from megarl.bench.report import aligned

COLUMNS = ("weights", "completions", "kept", "vLLM's", "none", "kept / none", "plain vLLM's", "plain none",
           "kept / plain none")  # fmt: skip


def rollout_table(report: dict[str, Any]) -> str:
    """Return tokens per second as text, with a row for each kind of weights and concurrency."""
    settings = report["settings"]
    head = (
        f"{settings['model']}: prompts of {settings['prompt_tokens']} tokens, {settings['samples']} completions each "
        f"of {settings['response_tokens']} tokens, r={settings['r']}, {settings['dtype']}; tokens/s by way of logprobs"
    )
    rows = [
        _row(weights, completions, index, report)
        for weights in report["rates"]
        for index, completions in enumerate(settings["concurrency"])
    ]
    starts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report["start_seconds"].items())
    notes = [
        "kept: sampler.logprobs=worker; vLLM's: token by token; none: without logprobs, which megarl cannot train on",
        f"start of each engine: {starts}",
    ]
    return "\n".join([head, "", *aligned([COLUMNS, *rows]), "", *notes])


def _row(weights: str, completions: int, index: int, report: dict[str, Any]) -> tuple[str, ...]:
    rates, plain = report["rates"][weights], report["plain"].get(weights)
    kept, none = rates["worker"][index], rates["none"][index]
    peer = ("-", "-", "-")
    if plain:
        peer = (f"{plain['vllm'][index]:,.0f}", f"{plain['none'][index]:,.0f}", f"{kept / plain['none'][index]:.1%}")
    own = (f"{kept:,.0f}", f"{rates['vllm'][index]:,.0f}", f"{none:,.0f}", f"{kept / none:.1%}")
    return (weights, str(completions), *own, *peer)
