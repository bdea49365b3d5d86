# SPDX-License-Identifier: Apache-2.0
"""``WeightSync`` over real ranks: all of them see how a sync ended, and why. The engines stand in for vLLM's."""

import os
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


def synced_near(damaged: bool) -> list[str]:
    """Two syncs by ``ipc`` from two ranks to two engines, as if each had a GPU with one rank; then what they got."""
    import torch
    import torch.distributed as dist

    from megarl.checkpoint_engine.choice import Memory, Sender
    from megarl.checkpoint_engine.weight_sync import WeightSync
    from megarl.errors import WeightSyncError
    from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config

    class OwnPlace(Rank):
        """A rank on a GPU of its own; its tensors are those of rank 0, unless they are damaged."""

        def place(self):
            return Sender(Memory("here", f"GPU-{self.rank}"))

        def export_weights(self, adapter_only: bool):
            for name, tensor in super().export_weights(adapter_only):
                yield name, tensor + (damaged and self.rank == 1 and adapter_only)

    dist.init_process_group("gloo")
    model = OwnPlace(dist.get_rank())
    model.version = 1
    engines = [Engine(0, 1), Engine(1, 2)] if model.rank == 0 else []
    for engine, gpu in zip(engines, (1, 0), strict=False):
        engine.memory = Memory("here", f"GPU-{gpu}")
    weights = WeightSync(model, engines, config("auto"))
    told = []
    try:
        told.append(weights.sync("base").kind)
        told.append(weights.sync().kind)
        told.append(str(model._outbox.sender._link.indices))
    except WeightSyncError as error:
        told.append(str(error))
    tensors = [tensors for engine in engines for tensors in engine.tensors.values()]
    told += [str(all(torch.equal(one["adapter.5"], torch.full((1000,), 5.0)) for one in tensors))] * bool(tensors)
    weights.close()
    dist.barrier()
    return told


def test_each_engine_gets_the_weights_from_the_rank_on_its_gpu():
    first, second = run_ranks(synced_near, 2, False)
    assert first == ["base", "adapter", "(1, 2)", "True"]
    assert second == ["base", "adapter", "(0,)"]


def test_ranks_that_differ_are_an_error_that_names_one():
    first, second = run_ranks(synced_near, 2, True)
    assert first[0] == second[0] == "base" and first[1] == second[1]
    assert "adapter of version 1 was not synced: trainer, transfer: trainer rank 1 sent 6 tensors" in first[1]


def benched(folder: str) -> list[str]:
    """Let two ranks be the trainer of `bench sync`: syncs and scores of two versions."""
    from pathlib import Path

    import numpy as np

    from megarl.bench.random_weights import model_folder
    from megarl.bench.syncing.settings import parse_sync_settings
    from megarl.bench.syncing.trainer import SyncTrainer
    from tests.unit.checkpoint_engine.test_manager import Engine

    settings = parse_sync_settings("tiny", ["data=2", "r=4", "dtype=float32", "device=cpu"])
    scratch = Path(folder) / str(os.getpid())
    scratch.mkdir()
    trainer = SyncTrainer(settings, model_folder("tiny", scratch))
    if trainer.model.groups.rank != 0:
        trainer.follow()
        return [f"version {trainer.version}"]
    engines = [Engine(0, 1), Engine(1, 2)]
    trainer.open("adapter", engines)
    told, tokens = [trainer.sync("base")[1].kind], np.arange(5, 25)
    for seed in (None, 7):
        trainer.change(seed)
        seconds, report = trainer.sync()
        told.append(f"{report.kind} {report.version} {seconds > 0} {trainer.logprobs(tokens)[0]:.3f}")
    told.append(f"{trainer.transport} {[engine.resident for engine in engines]}")
    trainer.close()
    trainer.end()
    return told


def test_the_benchs_other_ranks_do_what_rank_0_does(tmp_path):
    first, second = run_ranks(benched, 2, str(tmp_path))
    assert [line.rsplit(" ", 1)[0] for line in first[:3]] == ["base", "adapter 1 True", "adapter 2 True"]
    assert first[1].split()[-1] != first[2].split()[-1], "the adapter did not change"
    assert first[3] == "ipc [2, 2]" and second == ["version 2"]


def brought_back() -> list[str]:
    """A sync to an engine that dies before it connects to the rank on its GPU, rank 1; then one to its successor."""
    import torch.distributed as dist

    from megarl.checkpoint_engine.choice import Memory, Sender
    from megarl.checkpoint_engine.weight_sync import WeightSync
    from megarl.errors import WeightSyncError
    from megarl.futures import in_thread
    from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config

    dist.init_process_group("gloo")
    model = Rank(dist.get_rank())
    model.version, model.place = 1, lambda: Sender(Memory("here", f"GPU-{model.rank}"))
    engines = [Engine(0, 1), Engine(1, 1)] if model.rank == 0 else []
    for engine in engines:
        engine.memory = Memory("here", f"GPU-{int(engine.name[-1])}")
    if engines:
        engines[1].receive = lambda endpoint, first: in_thread(lambda: time.sleep(1.0) or 1 // 0)
    weights = WeightSync(model, engines, config("ipc", timeout=60.0))
    try:
        told = [weights.sync().kind]
    except WeightSyncError as error:
        told = [str(error)]
    for engine in engines:
        vars(engine).pop("receive", None)
        engine.open = {}
    told += [report.kind for report in weights.readmit()]
    told += [f"{engine.resident} {sorted(engine.tensors)}" for engine in engines]
    weights.close()
    dist.barrier()
    return told


def test_a_rank_gives_up_an_engine_that_never_connects():
    start = time.monotonic()
    first, second = run_ranks(brought_back, 2)
    assert time.monotonic() - start < 30, "rank 1 waited for the engine"
    assert "sampler 1, transfer: integer division or modulo by zero" in first[0] and second[0] == first[0]
    assert first[1:] == ["base", "adapter", "1 [0]", "1 [1]"] and second[1:] == ["base", "adapter"]


def left_in_a_collective(before: int, late: float) -> list[str]:
    """So many syncs whose export is a collective, and one in which rank 1 fails before the collective.

    Rank 0 begins that transfer so many seconds late.
    """
    import torch
    import torch.distributed as dist

    from megarl.checkpoint_engine.weight_sync import WeightSync
    from megarl.errors import WeightSyncError
    from tests.unit.checkpoint_engine.test_manager import Engine, Rank, config

    dist.init_process_group("gloo")
    # Only the exports use it, so what the ranks tell each other below cannot meet an export's collective.
    exporters = dist.new_group()

    class Gathering(Rank):
        """A rank of which the other one needs something for the export."""

        fails, begun, ended = False, 0, False

        def send_weights(self, version: int, kind: str):
            time.sleep(late if self.rank == 0 and version == 9 else 0.0)
            try:
                return super().send_weights(version, kind)
            finally:
                self.ended = True

        def export_weights(self, adapter_only: bool):
            if self.fails:
                raise ValueError("out of luck")
            self.begun += 1
            dist.all_reduce(torch.zeros(1), group=exporters)
            yield from super().export_weights(adapter_only)

    model = Gathering(dist.get_rank())
    weights = WeightSync(model, [Engine(0, 1)] if model.rank == 0 else [], config("ipc", timeout=60.0))
    told = []
    for version in range(before):
        model.version = version
        told.append(f"version {weights.sync().version}")
    model.version, model.fails, model.begun, model.ended = 9, model.rank == 1, 0, False
    began = time.monotonic()
    try:
        weights.sync()
    except WeightSyncError as error:
        told += [str(error), f"at once: {time.monotonic() - began < 20.0}"]
    _let_end(model, lambda: dist.all_reduce(torch.zeros(1), group=exporters))
    return told


def _let_end(model, join) -> None:
    """Let rank 1 join the collectives of rank 0's transfer until that has ended; it may not even have begun."""
    import torch.distributed as dist

    joined, ended = 0, False
    while not ended:
        while model.rank == 0 and not model.ended and model.begun == joined:
            time.sleep(0.01)
        # In this order: a transfer that has ended begins no other export.
        state = [model.ended, model.begun]
        dist.broadcast_object_list(state, 0)
        ended, begun = state
        for _ in range(joined, begun if model.rank else joined):
            join()
        joined = begun


@pytest.mark.parametrize(("before", "late"), [(0, 0.0), (2, 0.0), (2, 1.0)])
def test_an_error_is_seen_while_rank_0_waits_in_a_collective(before: int, late: float):
    told, others = run_ranks(left_in_a_collective, 2, before, late)
    assert told == others and len(told) == before + 2 and told[-1] == "at once: True"
    assert "trainer, transfer: rank 1: " in told[-2] and "out of luck" in told[-2]
