# SPDX-License-Identifier: Apache-2.0
"""The choice between adapter and merged weights follows from their costs."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.bench.syncing import choose
from megarl.bench.syncing.choose import break_even, verdict
from megarl.bench.syncing.settings import parse_sync_settings
from megarl.sampler.plain.rates import Load


def row(kind: str, ms: float, rate: float) -> dict:
    return {"kind": kind, "ms": ms, "tokens_per_second": rate, "logprob_difference_mean": 1e-2}


def test_the_content_that_costs_less_for_a_step_is_named() -> None:
    rows = [row("adapter", 5.0, 40_000.0), {"kind": "base", "ms": 500.0}, row("merged", 405.0, 50_000.0)]
    lines = verdict(rows)
    assert "a step of 30,000 sampled tokens: adapter 0.76 s, merged 1.00 s; use adapter" in lines
    assert "a step of 300,000 sampled tokens: adapter 7.50 s, merged 6.41 s; use merged" in lines
    # 0.4 s more for the sync, 5 us less for each token.
    assert break_even([rows[0], rows[2]]) == pytest.approx(80_000)
    assert lines[-1] == "both cost the same at 80,000 sampled tokens a step"


def test_the_rate_is_that_of_all_engines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one engine's, multiplied: several engines may share a GPU."""
    running, most = [], []

    class Engine:
        def start_generate(self, prompts: list, version: int) -> Future:
            running.append(len(prompts))
            answer: Future = Future()
            groups = [[SimpleNamespace(response_ids=[1, 2, 3])] for _ in prompts]
            answer.result = lambda: most.append(len(running)) or groups  # type: ignore[method-assign]
            return answer

    def measured(load: Load, ways: dict) -> dict:
        assert load.concurrency == [3 * 16] and list(ways) == ["engines"]
        return {"engines": [float(ways["engines"]([np.arange(4)] * 7))]}

    monkeypatch.setattr(choose, "rates", measured)
    settings = parse_sync_settings("tiny", ["choose=true", "engines=3", "concurrency=16"])
    assert choose.decode_rate(settings, [Engine()] * 3, 1, 100) == 7 * 3
    assert running == [3, 2, 2] and most == [3, 3, 3]


@pytest.mark.parametrize(
    "rows",
    [
        [row("adapter", 5.0, 50_000.0), row("merged", 400.0, 40_000.0)],
        [row("adapter", 5.0, 4.0), row("merged", 6.0, 4.0)],
        [row("adapter", 5.0, 4.0)],
    ],
)
def test_where_one_is_always_better_there_is_no_break_even(rows: list[dict]) -> None:
    assert break_even(rows) is None and not any("both cost" in line for line in verdict(rows))


def test_without_rates_nothing_is_said() -> None:
    assert verdict([{"kind": "adapter", "ms": 5.0}]) == []
