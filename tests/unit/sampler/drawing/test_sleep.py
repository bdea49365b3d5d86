# SPDX-License-Identifier: Apache-2.0
"""An engine sleeps without requests, and what it holds afterwards is compared with what it held."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from megarl.checkpoint_engine.buckets.splitmix import mix64
from megarl.checkpoint_engine.receiver import sleep as worker
from megarl.config import parse_config
from megarl.errors import ConfigError, UnsupportedError, WeightSyncError
from megarl.sampler.drawing.sleep import Sleep
from megarl.sampler.engine.device_checks import check_device


class Engine:
    """Stand in for vLLM's engine and its worker."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    async def rpc(self, method: str) -> list[int]:
        self.calls.append(method)
        if method == self.fails:
            raise WeightSyncError("tensor 'x' changed")
        return [7]

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self) -> None:
        self.calls.append("wake")


class Gate:
    in_flight = 0
    refused = ""

    def refuse(self, reason: str) -> None:
        self.refused = reason


def rig() -> tuple[Sleep, Engine, Gate]:
    async def answer(awaitable):
        return await awaitable

    engine, gate = Engine(), Gate()
    return Sleep(SimpleNamespace(gate=gate), lambda: engine, answer, engine.rpc), engine, gate


def test_an_engine_sleeps_and_wakes_once_and_answers_nothing_meanwhile() -> None:
    sleep, engine, _ = rig()
    assert asyncio.run(sleep.begin()) == 7 and asyncio.run(sleep.begin()) == 0
    with pytest.raises(WeightSyncError, match="wake it first"):
        sleep.check_awake()
    asyncio.run(sleep.end())
    asyncio.run(sleep.end())
    sleep.check_awake()
    assert engine.calls == [
        "megarl_before_sleep", "sleep 1", "megarl_after_sleep", "megarl_before_wake", "wake", "megarl_after_wake"
    ]  # fmt: skip


def test_no_request_is_lost_to_a_sleep() -> None:
    sleep, engine, gate = rig()
    gate.in_flight = 3
    with pytest.raises(WeightSyncError, match="3 requests are in flight"):
        asyncio.run(sleep.begin())
    assert not engine.calls and not sleep.asleep


@pytest.mark.parametrize(("fails", "refused"), [("megarl_before_wake", ""), ("megarl_after_wake", "changed")])
def test_an_engine_that_does_not_wake_as_it_was_answers_nothing(fails: str, refused: str) -> None:
    sleep, engine, gate = rig()
    asyncio.run(sleep.begin())
    engine.fails = fails
    with pytest.raises(WeightSyncError, match="changed"):
        asyncio.run(sleep.end())
    assert sleep.asleep and refused in gate.refused and bool(gate.refused) == bool(refused)
    assert ("wake" in engine.calls) == bool(refused)  # without room vLLM is not asked, since it would die


class Model(torch.nn.Module):
    """A layer with a parameter, a buffer, LoRA slots, and the cache of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("table", torch.arange(4.0))
        self.lora_a_stacked = (torch.ones(2, 3), torch.ones(2, 5))
        self.kv_cache = [torch.zeros(8)]


def extension(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> tuple[worker.SleepExtension, Model]:
    """Return a worker whose digests are computed on the CPU, and whose GPU has so many free bytes at each look."""
    model = Model()
    held = worker.SleepExtension()
    held.model_runner = SimpleNamespace(get_model=lambda: model, kv_caches=[model.kv_cache[0]])
    held.rank = 0
    by_hand = {"digests": lambda tensors: {n: mix64(t.detach().numpy().tobytes()) for n, t in tensors.items()}}
    for name, function in by_hand.items():
        monkeypatch.setattr(worker, name, function)
    monkeypatch.setattr(worker.torch.cuda, "mem_get_info", lambda: (free.pop(0), 0))
    monkeypatch.setattr(worker.torch.cuda, "empty_cache", lambda: None)
    return held, model


def test_every_tensor_is_compared_but_the_cache_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    held, model = extension(monkeypatch, [100, 350, 250])
    held.megarl_before_sleep()
    assert held.megarl_after_sleep() == 250
    held.megarl_before_wake()
    model.kv_cache[0].fill_(9)
    assert held.megarl_after_wake() == 5
    for change in (model.layer.weight, model.layer.bias, model.table, *model.lora_a_stacked):
        with torch.no_grad():
            before = change.clone()
            change.view(-1)[-1] += 1
            with pytest.raises(WeightSyncError, match="other values after its sleep in"):
                held.megarl_after_wake()
            change.copy_(before)


def test_a_gpu_without_room_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = extension(monkeypatch, [1 << 30, 9 << 30, 7 << 30])
    held.megarl_before_sleep()
    held.megarl_after_sleep()
    with pytest.raises(WeightSyncError, match=r"needs 8.0 GiB and 7.0 GiB of its GPU are free.*micro_batch_tokens"):
        held.megarl_before_wake()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampler": {"sleep": True, "share_gpus": False}}, "sampler.share_gpus is false"),
        ({"sampler": {"sleep": True}, "train": {"max_staleness": 2}}, "train.max_staleness 2"),
    ],
)
def test_a_sleep_that_nobody_could_use_is_refused(sections: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"model": {"path": "m"}, "task": {"name": "arithmetic"}, **sections})


def test_engines_on_cpus_do_not_sleep() -> None:
    config = parse_config({"model": {"path": "m"}, "task": {"name": "arithmetic"}, "sampler": {"sleep": True}})
    with pytest.raises(UnsupportedError, match="sleep is true, which needs GPUs"):
        check_device(config.engine, "cpu")
