# SPDX-License-Identifier: Apache-2.0
"""The choice between adapter and merged weights follows from their costs."""

import pytest

from megarl.bench.syncing.choose import break_even, verdict


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
