# SPDX-License-Identifier: Apache-2.0
"""Test what becomes of requests at a new version where vLLM is late or fails; the real engine is in tests/e2e."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.checkpoint_engine.records import Receipt
from megarl.config import CheckpointEngineConfig, EngineConfig, ModelConfig, SamplerConfig
from megarl.errors import StaleVersionError, UnsupportedError, WeightSyncError
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.drawing.requests import Requests
from megarl.sampler.engine.settings import check_sampled
from tests.helpers.models import make_model

PROMPT = np.array([1, 2, 3])


class Engine:
    """An engine that draws the token 7 until it is told to end a request; it ignores the first ``deaf`` aborts."""

    def __init__(self, deaf: int = 0) -> None:
        self.deaf, self.ended, self.asked = deaf, dict[str, asyncio.Event](), list[tuple]()
        self.priorities = list[int]()

    async def generate(self, prompt, parameters, request_id, lora_request, priority):
        self.priorities.append(priority)
        self.asked.append((prompt["prompt_token_ids"], parameters.seed, parameters.max_tokens, lora_request.lora_name))
        self.ended[request_id] = asyncio.Event()
        reason = "length"
        if len(self.asked) == 1:
            await self.ended[request_id].wait()
            reason = "abort"
        drawn = [SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}], finish_reason=reason)]
        yield SimpleNamespace(
            finished=True, outputs=drawn * parameters.n, prompt_token_ids=list(prompt["prompt_token_ids"])
        )

    async def abort(self, names):
        self.deaf -= 1
        if self.deaf < 0:
            for name in names:
                self.ended[name].set()


def requests_at(version: int | None, way: str, engine: Engine, reproducible: bool = False) -> Requests:
    pytest.importorskip("vllm")
    config = EngineConfig(
        model=ModelConfig(path="model"),
        sampler=SamplerConfig(samples_per_prompt=2, max_response_tokens=5, reproducible=reproducible),
        checkpoint_engine=CheckpointEngineConfig(in_flight=way),
    )
    gate = VersionGate(base_ready=True)
    if version is not None:
        become(gate, version)
    return Requests(config, "sampler 0", (0,), gate, lambda: engine)


def become(gate: VersionGate, version: int) -> None:
    gate.stage([Receipt(version, "adapter", 0, 1, 1, "c")])
    gate.check_flip(version, "adapter", "c")
    gate.flip()


async def begin(way: str, engine: Engine, version: int | None = None) -> tuple[Requests, asyncio.Task]:
    """Return requests at version 1, and the task of one that the engine has begun."""
    requests = requests_at(1, way, engine)
    task = asyncio.ensure_future(requests.complete(PROMPT, seed=10, version=version))
    await asyncio.sleep(0.01)
    return requests, task


async def sync(requests: Requests, version: int, timeout: float = 5.0) -> None:
    """Do what ``VllmSampler.flip`` does."""
    async with requests.drained(timeout):
        become(requests.gate, version)
    await requests.move(version, timeout)


@pytest.mark.parametrize(("way", "versions", "lengths"), [("abort", [2], [3, 3]), ("continue", [1, 2], [4, 4])])
def test_requests_move_also_if_vllm_does_not_hear_the_first_abort(way, versions, lengths):
    async def run():
        engine = Engine(deaf=2)
        requests, task = await begin(way, engine)
        await sync(requests, 2)
        return engine, await task

    engine, completions = asyncio.run(run())
    assert [one.versions.tolist() for one in completions] == [versions, versions]
    assert [name for *_, name in engine.asked] == ["policy-v1", "policy-v2", "policy-v2"]
    assert [len(sent) for sent, *_ in engine.asked[1:]] == lengths
    assert [left for _, _, left, _ in engine.asked] == [5, *(5 - (length - 3) for length in lengths)]
    seeds = [seed for _, seed, *_ in engine.asked]
    assert seeds[1:] == [10, 11] if way == "abort" else len(set(seeds)) == 3


def test_a_drain_that_does_not_end_names_the_setting_and_lets_new_requests_in_again():
    async def run():
        requests, task = await begin("drain", Engine())
        with pytest.raises(WeightSyncError, match=r"1 requests did not end within half of checkpoint_engine.time"):
            await sync(requests, 2, timeout=0.1)
        assert requests.gate.resident == 1
        again = await requests.complete(PROMPT, seed=1)
        task.cancel()
        return again

    assert [one.versions.tolist() for one in asyncio.run(run())] == [[1], [1]]


def test_a_drain_ends_with_the_last_request_and_not_at_a_later_look(monkeypatch):
    monkeypatch.setattr("megarl.sampler.drawing.requests.LOOK_SECONDS", 30.0)

    async def run():
        requests, first = await begin("drain", Engine())
        syncing = asyncio.ensure_future(sync(requests, 2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait_for(syncing, 10.0)

    asyncio.run(run())


def test_a_drain_holds_new_requests_until_the_version_is_current():
    async def run():
        engine = Engine()
        requests, first = await begin("drain", engine)
        syncing = asyncio.ensure_future(sync(requests, 2))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(requests.complete(PROMPT, seed=1))
        await asyncio.sleep(0.05)
        assert len(engine.asked) == 1 and not syncing.done()
        first.cancel()
        await syncing
        return await second

    assert [one.versions.tolist() for one in asyncio.run(run())] == [[2], [2]]


def test_overlapping_versions_wait_only_for_a_slot():
    async def run():
        requests, first = await begin("overlap", Engine())
        await sync(requests, 2, timeout=0.5)
        second = await requests.complete(PROMPT, seed=1)
        assert not first.done() and [one.versions.tolist() for one in second] == [[2], [2]]
        await requests.leave_slot(3, 0.1)
        with pytest.raises(WeightSyncError, match="1 requests did not end and leave a slot within half of"):
            await requests.leave_slot(2, 0.1)
        waiting = asyncio.ensure_future(requests.leave_slot(2, 5.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.cancel()
        await waiting

    asyncio.run(run())


def test_requests_for_one_version_neither_move_nor_hold_a_drain_up():
    async def run(way):
        engine = Engine()
        requests, task = await begin(way, engine, version=1)
        await sync(requests, 2, timeout=0.5)
        assert not task.done() and len(engine.asked) == 1
        task.cancel()

    for way in ("drain", "overlap", "abort", "continue"):
        asyncio.run(run(way))


@pytest.mark.parametrize(("reproducible", "priorities"), [(True, [30, 20]), (False, [0, 0])])
def test_seeds_order_the_requests_of_a_reproducible_batch(reproducible, priorities):
    """Ray may call an actor's methods in another order than it was asked to."""

    async def run():
        engine = Engine()
        requests = requests_at(1, "drain", engine, reproducible)
        calls = [asyncio.ensure_future(requests.complete(PROMPT, seed, 1)) for seed in (30, 20)]
        await asyncio.sleep(0.01)
        await engine.abort(engine.ended)
        await asyncio.gather(*calls, return_exceptions=True)
        return engine.priorities

    assert asyncio.run(run()) == priorities


def test_nothing_is_drawn_before_the_first_version():
    with pytest.raises(StaleVersionError, match="holds no policy version yet"):
        asyncio.run(requests_at(None, "abort", Engine()).complete(PROMPT, 0))


def test_stop_texts_are_refused_if_requests_go_on_under_a_new_version(tmp_path: Path):
    config = EngineConfig(
        model=ModelConfig(path=str(make_model(tmp_path, "qwen3", tied=False))),
        sampler=SamplerConfig(stop=["</answer>"]),
        checkpoint_engine=CheckpointEngineConfig(in_flight="continue"),
    )
    with pytest.raises(UnsupportedError, match="a stop text could begin"):
        check_sampled(config)
