# SPDX-License-Identifier: Apache-2.0
"""`megarl bench train` measures the same model at every layout, and starts its ranks by itself."""

from pathlib import Path
from typing import Any

import pytest

from megarl.bench.training.ranks import run_contender
from megarl.bench.training.settings import BenchSettings, parse_settings
from tests.helpers.ranks import run_ranks

FAST = ["dtype=float32", "sequences=2", "length=12", "warmup=1", "steps=1"]


def measured(name: Any, settings: BenchSettings, folder: str) -> dict[str, Any]:
    """Measure on this rank."""
    from megarl.bench.training.contender import measure
    from megarl.parallel.groups import destroy_groups

    result = measure(name, name, settings, Path(folder))
    destroy_groups()
    return result


@pytest.mark.parametrize(
    ("name", "shape", "layouts"),
    [
        ("local", "tiny", (["tensor=2"], ["pipeline=2"], ["data=2"])),
        ("local", "tiny-moe", (["data=2", "expert=2"],)),
        ("full", "tiny-moe", (["tensor=2"],)),
    ],
)
def test_a_layout_measures_the_model_that_one_rank_does(name: str, shape: str, layouts: tuple, tmp_path: Path) -> None:
    """Updates are made too, so a wrong gradient would show."""
    settings = parse_settings(shape, [*FAST, "micro_batches=2"])
    [alone] = run_ranks(measured, 1, name, settings, str(tmp_path))
    assert alone["ranks"] == 1 and alone["tokens_per_second"] > 0
    for layout in layouts:
        # The batch grows with data, so that as many micro-batches are the same batch.
        rounds = 1 if "data=2" in layout else 2
        settings = parse_settings(shape, [*FAST, *layout, f"micro_batches={rounds}"])
        first, second = run_ranks(measured, 2, name, settings, str(tmp_path))
        assert first["ranks"] == 2 and first["tokens_per_second"] > 0
        assert first["peak_gib"] == second["peak_gib"] > 0
        assert ("forward" in first["phases"]) == (layout != ["pipeline=2"])
        assert first["logprob"] == pytest.approx(alone["logprob"], abs=1e-5), layout


def test_the_ranks_of_a_contender_are_processes(tmp_path: Path) -> None:
    settings = parse_settings("tiny", [*FAST, "tensor=2", "dropout=0.1", "recompute=full"])
    result = run_contender("local", settings, tmp_path, ["profile"])
    assert "error" not in result and result["ranks"] == 2, result
    assert {file.name for file in tmp_path.glob("*rank1*")} == {"local-rank1.log", "profile-local-rank1.txt"}
