# SPDX-License-Identifier: Apache-2.0
"""``WeightSync`` over real ranks: all of them see how a sync ended, and why. The engines stand in for vLLM's."""

import time

import pytest

from tests.helpers.ranks import run_ranks


def outcomes(broken: int | None) -> list[str]:
    """Two syncs on each rank; the export of rank ``broken`` raises in the second."""
    import torch
    import torch.distributed as dist

    from megarl.checkpoint_engine.weight_sync import WeightSync
    from megarl.errors import WeightSyncError
    from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config

    dist.init_process_group("gloo")
    model = Rank(dist.get_rank())
    model.version = 7
    engines = [Engine(0, 1), Engine(1, 2)] if model.rank == 0 else []
    weights = WeightSync(model, engines, config())
    told = [f"version {weights.sync().version}"]
    if broken is None:
        merged = WeightSync(model, engines, config().model_copy(update={"content": "merged"}))
        told += [f"{report.kind} {report.count}" for report in (merged.sync("base"), merged.sync())]
    if model.rank == broken:

        def export_weights(adapter_only: bool):
            yield "adapter.0", torch.ones(1000)
            raise ValueError("out of luck")

        model.export_weights = export_weights
    model.version = 8
    try:
        told.append(f"version {weights.sync().version}")
    except WeightSyncError as error:
        told.append(str(error))
    told += [f"{engine.resident} {engine.refused is None}" for engine in engines]
    dist.barrier()
    return told


def test_every_rank_gets_the_report():
    first, second = run_ranks(outcomes, 2, None)
    assert first == ["version 7", "base 6", "merged 3", "version 8", "8 True", "8 True"]
    assert second == ["version 7", "base 6", "merged 3", "version 8"]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_any_rank_is_every_ranks_and_closes_the_engines(broken):
    start = time.monotonic()
    first, second = run_ranks(outcomes, 2, broken)
    assert first[0] == second[0] == "version 7"
    assert first[1] == second[1]
    assert "out of luck" in first[1] and "trainer, transfer" in first[1]
    assert ("rank 1: " in first[1]) == (broken == 1)
    assert first[2:] == ["7 False", "7 False"]
    assert time.monotonic() - start < 60
