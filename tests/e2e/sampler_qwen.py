# SPDX-License-Identifier: Apache-2.0
"""Scenarios ``qwen3`` and ``qwen2`` of ``sampler_scenarios``: the distribution, seeds, transports, stops, death."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import transformers

from megarl.config import CheckpointEngineConfig
from megarl.config.sections.eval import Sampling
from tests.e2e.sampler_logprobs import both_ways, shared_prefill
from tests.e2e.sampler_orders import orders
from tests.e2e.sampler_readmission import readmission
from tests.e2e.sampler_rig import (
    LORA,
    PeftTrainer,
    Rig,
    largest,
    likely_token,
    make_model,
    make_tokenizer,
    places,
    prompts,
    raised,
    run_config,
)
from tests.helpers.processes import find_engine

# Completed by a token's name, which begins with t, after one that ends with 7; a tokenizer may join them by a space.
STOPS = ("7t", "7 t")


def qwen3(folder: Path) -> dict[str, Any]:
    """Tied Qwen3 with a given head size, temperature 0.7, gloo: distribution, seeds, a batch above a step's budget."""
    make_model("qwen3", folder)
    trainer = PeftTrainer(folder, LORA)
    rig = Rig(run_config(folder, sampler={"temperature": 0.7}, checkpoint_engine={"transport": "gloo"}), trainer)
    try:
        rig.manager.sync(0, "base")
        trainer.randomise(3)
        reports = [rig.manager.sync(3, "adapter")]
        many = rig.generate(prompts(100, seed=1), 3)
        rig.sampler._calls = {}
        again = rig.generate(prompts(100, seed=1), 3)
        differences = rig.differences(many[:10])
        results = {
            "error": largest(differences),
            "places": places(differences, 1e-4),
            "error_at_temperature_1": rig.error(many[:10], temperature=1.0),
            "tokens": sum(len(prompt) for prompt in prompts(100, seed=1)) * 4,
            "same_again": np.mean([np.array_equal(a.response_ids, b.response_ids) for a, b in pairs(many, again)]),
            "samples_differ": np.mean([len({tuple(one.response_ids) for one in group}) > 1 for group in many]),
            "first_tokens": len({int(one.response_ids[0]) for group in many for one in group}),
        }
        results["logprobs"] = [
            both_ways(rig, 3),
            both_ways(rig, 3, Sampling(2, 1.3, 0.8, 16)),
            both_ways(rig, 3, Sampling(1, 0.0, 1.0, 16)),
        ]
        results["orders"] = orders(rig, 3)
        results["prefill"] = shared_prefill(rig, 3, 96)
        results["readmission"] = readmission(rig, 10)
        trainer.randomise(3)
        rig.config = rig.config.model_copy(update={"checkpoint_engine": CheckpointEngineConfig(transport="shm")})
        rig.renew()
        reports.append(rig.manager.sync(4, "adapter"))
        same = rig.generate(prompts(3), 4)
        return results | {"checksums": [report.checksum for report in reports], "shm_error": rig.error(same)}
    finally:
        rig.call(rig.sampler.close())


def pairs(left: list, right: list) -> list[tuple[Any, Any]]:
    """Pair the completions of two calls."""
    return [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]


def qwen2(folder: Path) -> dict[str, Any]:
    """Qwen2 (attention bias): the base is sent by the weight path, in many small buckets; stop strings; death."""
    make_model("qwen2", folder)
    trainer = PeftTrainer(folder, LORA)
    trainer.randomise(1)
    eos = likely_token(trainer, [3, 7])
    make_tokenizer(folder, eos)
    rig = Rig(run_config(folder, sampler={"stop": [*STOPS, "no such text"]}), trainer)
    try:
        rig.manager.sync(0, "base")
        rig.manager.sync(1, "adapter")
        results = {"error": rig.error(rig.generate(prompts(4), 1)), "stop": stops(rig, eos)}
        return results | {"death_in_sync": death_in_sync(rig)}
    finally:
        rig.call(rig.sampler.close())


def stops(rig: Rig, eos: int) -> dict[str, int]:
    """Count how completions end that a stop string may end; ``eos`` is the end of sequence of the tokenizer only."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(rig.config.model.path)
    ones = [one for group in rig.generate(prompts(60), 1) for one in group]

    def holds_stop(ids: np.ndarray) -> bool:
        return any(stop in tokenizer.decode(ids, skip_special_tokens=True) for stop in STOPS)

    by_text = [one.finish_reason == "stop" and holds_stop(one.response_ids) for one in ones]
    by_id = [one.finish_reason == "stop" and int(one.response_ids[-1]) in (3, 7) for one in ones]
    return {
        "by_text": sum(by_text),
        "by_id": sum(by_id),
        "by_neither": sum(
            one.finish_reason == "stop" and not text and not token
            for one, text, token in zip(ones, by_text, by_id, strict=True)
        ),
        "too_late": sum(holds_stop(one.response_ids[:-1]) for one in ones),
        "overlooked": sum(one.finish_reason == "length" and holds_stop(one.response_ids) for one in ones),
        "tokenizers_eos_inside": sum(int((one.response_ids[:-1] == eos).sum()) for one in ones),
        "model_eos_inside": sum(int(np.isin(one.response_ids[:-1], [3, 7]).sum()) for one in ones),
    }


def death_in_sync(rig: Rig) -> dict[str, Any]:
    """Kill an engine process while a sync waits for its answer."""
    engine = find_engine(psutil.Process())
    engine.suspend()
    pool = ThreadPoolExecutor(1)
    running = pool.submit(lambda: raised(lambda: rig.manager.sync(2, "adapter")))
    time.sleep(0.5)
    assert not running.done()
    engine.kill()
    started = time.monotonic()
    return {"error": running.result(), "seconds": time.monotonic() - started}
