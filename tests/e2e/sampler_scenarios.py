# SPDX-License-Identifier: Apache-2.0
"""Run real engines, with results as JSON: ``python -m tests.e2e.sampler_scenarios SCENARIO FOLDER OUT``."""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megarl.sampler import prepare_environment

prepare_environment(1)

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from megarl.checkpoint_engine.base import TRANSPORTS  # noqa: E402
from megarl.config import CheckpointEngineConfig  # noqa: E402
from tests.e2e.sampler_faults import FIRST  # noqa: E402
from tests.e2e.sampler_moves import moves  # noqa: E402
from tests.e2e.sampler_rig import (  # noqa: E402
    PeftTrainer,
    Rig,
    likely_token,
    make_model,
    make_tokenizer,
    overlapping,
    prompts,
    raised,
    run_config,
)
from tests.helpers.processes import find_engine  # noqa: E402

LORA = {"r": 8, "lora_alpha": 24, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# Completed by a token's name, which begins with t, after one that ends with 7; a tokenizer may join them by a space.
STOPS = ("7t", "7 t")
PATTERNS = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "rank_pattern": {"q_proj": 8, "layers.1.mlp.gate_proj": 3},
    "alpha_pattern": {"v_proj": 31, "layers.0.self_attn.o_proj": 1},
    "task_type": "CAUSAL_LM",
}


def llama(folder: Path) -> dict[str, Any]:
    """Untied Llama, temperature 1, mapped memory: versions, patterns, faults, leaks, death."""
    make_model("llama", folder)
    trainer = PeftTrainer(folder, LORA)
    started = time.monotonic()
    rig = Rig(run_config(folder, lora={"r": 8}, checkpoint_engine={"transport": "ipc"}), trainer)
    results: dict[str, Any] = {"start_seconds": time.monotonic() - started}
    try:
        results["before_sync"] = raised(lambda: rig.generate(prompts(1), 0))
        results["adapter_before_base"] = raised(lambda: rig.manager.sync(0, "adapter"))
        rig.renew(base_ready=False)
        rig.manager.sync(0, "base")
        results["base_only"] = raised(lambda: rig.generate(prompts(1), 0))
        results |= versions(rig)
        results |= overlapping(lambda count: overlap(rig, count), "overlapped")
        results |= overlapping(lambda count: third_version(rig, count), "third_overlapped")
        results["moves"] = moves(rig)
        results |= patterns(rig)
        results["faults"] = {name: fault(rig, edit) for name, edit in FAULTS.items()}
        results["faults"]["flipped_byte"] = flipped_byte(rig)
        results |= many_versions(rig)
        results |= new_base(rig)
        results["death"] = death(rig)
    finally:
        rig.call(rig.sampler.close())
    results["after_close"] = raised(lambda: rig.generate(prompts(1), 0))
    return results


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
        results = {
            "error": rig.error(many[:10]),
            "error_at_temperature_1": rig.error(many[:10], temperature=1.0),
            "tokens": sum(len(prompt) for prompt in prompts(100, seed=1)) * 4,
            "same_again": np.mean([np.array_equal(a.response_ids, b.response_ids) for a, b in pairs(many, again)]),
            "samples_differ": np.mean([len({tuple(one.response_ids) for one in group}) > 1 for group in many]),
            "first_tokens": len({int(one.response_ids[0]) for group in many for one in group}),
        }
        rig.config = rig.config.model_copy(update={"checkpoint_engine": CheckpointEngineConfig(transport="shm")})
        rig.renew()
        reports.append(rig.manager.sync(4, "adapter"))
        same = rig.generate(prompts(3), 4)
        return results | {"checksums": [report.checksum for report in reports], "shm_error": rig.error(same)}
    finally:
        rig.call(rig.sampler.close())


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


def versions(rig: Rig) -> dict[str, Any]:
    """Check that each version answers as PEFT does with the same adapter, and differs from the previous one."""
    results: dict[str, Any] = {"errors": [], "errors_of_previous": [], "sync_seconds": []}
    for version in range(2):
        rig.trainer.randomise(version)
        results["sync_seconds"].append(sum(rig.manager.sync(version, "adapter").seconds.values()))
        drawn = rig.generate(prompts(4), version)
        results["errors"].append(rig.error(drawn))
        rig.trainer.randomise(version - 1)
        results["errors_of_previous"].append(rig.error(drawn))
    results["wrong_version"] = raised(lambda: rig.generate(prompts(1), 0))
    ones = [one for group in rig.generate(prompts(20), 1) for one in group]
    results["stamps"] = sorted({int(version) for one in ones for version in one.versions})
    results["stops_end_with"] = sorted({int(one.response_ids[-1]) for one in ones if one.finish_reason == "stop"})
    results["lengths_of_length"] = sorted({len(one.response_ids) for one in ones if one.finish_reason == "length"})
    results["stop_inside"] = sum(int(np.isin(one.response_ids[:-1], [3, 7]).sum()) for one in ones)
    bad = {"empty": [], "long": [9] * 97, "unknown": [320]}
    results["bad_prompts"] = {
        name: raised(lambda ids=ids: rig.generate([np.array(ids, dtype=np.int64)], 1)) for name, ids in bad.items()
    }
    return results


def overlap(rig: Rig, count: int) -> dict[str, Any]:
    """Check that a version that arrives while the previous one decodes does not change what that one draws."""
    rig.trainer.randomise(1)
    rig.manager.sync(1, "adapter")
    running = rig.start_requests(rig.sampler.generate(prompts(count), 1), count)
    rig.trainer.randomise(2)
    rig.manager.sync(2, "adapter")
    ran_during = not running.done()
    held = rig.call(rig.sampler.resident())[0]
    drawn = running.result(120)
    rig.trainer.randomise(1)
    error = rig.error(drawn)
    rig.manager.sync(3, "adapter")
    return {
        "overlapped": ran_during,
        "overlap_error": error,
        "held_during": held,
        "held_after": rig.call(rig.sampler.resident())[0],
    }


def third_version(rig: Rig, count: int) -> dict[str, Any]:
    """Check that two versions in use leave no slot for a third; an idle one frees its slot."""
    rig.manager.sync(100, "adapter")
    running = rig.start_requests(rig.sampler.generate(prompts(count), 100), count)
    rig.manager.sync(101, "adapter")
    refused = raised(lambda: rig.manager.sync(102, "adapter"))
    # With no request left, version 100 would have made room. The refusal ends the requests, so ask for nothing else.
    overlapped = refused != "nothing"
    ended = raised(lambda: running.result(60))
    alive = rig.call(rig.sampler.resident())[0]
    rig.sampler.gate._refused = None
    rig.renew()
    rig.manager.sync(103, "adapter")
    results = {"third": refused, "third_overlapped": overlapped, "third_held": alive, "third_ended": ended}
    results["after_third"] = rig.error(rig.generate(prompts(2), 103))
    rig.renew(base_ready=True)
    return results


def patterns(rig: Rig) -> dict[str, Any]:
    """Check that rank_pattern, alpha_pattern and rsLoRA mean the same as in PEFT."""
    plain, results = rig.trainer, {}
    for version, rslora in ((3, False), (4, True)):
        rig.trainer = PeftTrainer(Path(rig.config.model.path), {**PATTERNS, "use_rslora": rslora})
        rig.trainer.randomise(version)
        rig.renew()
        rig.manager.sync(version, "adapter")
        results[f"patterns_rslora_{rslora}"] = rig.error(rig.generate(prompts(4), version))
        rig.trainer.finish_sync()
    rig.trainer = plain
    rig.renew()
    return results


def change_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], list]:
    """Return an edit of the first tensor of the export."""
    return lambda named: [(name, change(tensor) if name == FIRST else tensor) for name, tensor in named]


FAULTS: dict[str, Callable[[list], list]] = {
    "missing_half": lambda named: [pair for pair in named if pair[0] != FIRST],
    "missing_module": lambda named: [pair for pair in named if "layers.0.self_attn.q_proj" not in pair[0]],
    "missing_slice": lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]],
    "unknown_module": lambda named: [
        *named,
        *((name.replace("layers.0", "layers.7"), tensor) for name, tensor in named if "layers.0" in name),
    ],
    "twice": lambda named: [*named, named[0]],
    "wrong_shape": change_first(lambda tensor: tensor[:, :-1].contiguous()),
    "wrong_rank": change_first(lambda tensor: tensor[:-1].contiguous()),
    "nan": change_first(lambda tensor: torch.full_like(tensor, torch.nan)),
    "integers": change_first(lambda tensor: tensor.to(torch.int32)),
    "nothing": lambda named: [],
}


def fault(rig: Rig, edit: Callable[[list], list]) -> list[str]:
    """Return what sync raises, and then generate and another sync."""
    rig.trainer.change(edit)
    outcome = [raised(lambda: rig.manager.sync(5, "adapter"))]
    rig.trainer.change(lambda named: named)
    outcome += [raised(lambda version=version: rig.generate(prompts(1), version)) for version in (4, 5)]
    outcome.append(raised(lambda: rig.manager.sync(6, "adapter")))
    rig.renew(base_ready=True)
    return outcome


def flipped_byte(rig: Rig) -> list[str]:
    """Change a byte during the transfer."""
    TRANSPORTS["flipping"] = "tests.e2e.faulty_transport"
    config = rig.config
    rig.config = config.model_copy(update={"checkpoint_engine": CheckpointEngineConfig(transport="flipping")})
    rig.renew()
    outcome = fault(rig, lambda named: named)
    rig.config = config
    rig.renew()
    return outcome


def many_versions(rig: Rig) -> dict[str, Any]:
    """Sync 50 versions in a row: nothing accumulates, and the base stays the same."""
    engine = rig.sampler._engine
    before = rig.call(engine.compute_weight_checksums())
    rig.renew(base_ready=True)
    most, mapped = 0, [0]
    for version in range(10, 60):
        rig.trainer.randomise(version)
        rig.manager.sync(version, "adapter")
        drawn = rig.generate(prompts(1, seed=version), version)
        most = max(most, *(len(ids) for ids in rig.call(rig.sampler.resident())[0]))
        maps = Path(f"/proc/{find_engine(psutil.Process()).pid}/maps").read_text().splitlines()
        mapped.append(sum("megarl-" in line for line in maps))
    rig.trainer.finish_sync()
    rig.renew()
    return {
        "most_resident": most,
        "mapped": sorted(set(mapped[1:])),
        "base_unchanged": before == rig.call(engine.compute_weight_checksums()),
        "error_after_50": rig.error(drawn),
        "left_in_shm": [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name],
    }


def new_base(rig: Rig) -> dict[str, Any]:
    """Check that a base that fails half-way ends the engine's use, and a complete one gives Hugging Face's logprobs."""
    old = rig.generate(prompts(4), 59)
    for name, parameter in rig.trainer.model.named_parameters():
        if ".lora_" not in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    rig.trainer.edit = lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]]
    results = {"base_missing": raised(lambda: rig.manager.sync(59, "base"))}
    results["after_base_missing"] = raised(lambda: rig.generate(prompts(1), 59))
    rig.trainer.edit = lambda named: [*named, ("model.layers.0.mlp.extra.weight", torch.ones(2))]
    rig.renew(base_ready=False)
    results["base_extra"] = raised(lambda: rig.manager.sync(59, "base"))
    rig.trainer.edit = lambda named: named
    rig.renew(base_ready=False)
    rig.manager.sync(59, "base")
    results["after_base"] = raised(lambda: rig.generate(prompts(1), 59))
    rig.manager.sync(60, "adapter")
    drawn = rig.generate(prompts(4), 60)
    return results | {"base_error": rig.error(drawn), "base_error_of_old": rig.error(old)}


def death(rig: Rig) -> dict[str, Any]:
    """Kill an engine process while it decodes."""
    running = rig.start_requests(rig.sampler.generate(prompts(60), 60), 60)
    find_engine(psutil.Process()).kill()
    started = time.monotonic()
    during = raised(lambda: running.result(60))
    return {
        "during": during,
        "after": raised(lambda: rig.generate(prompts(1), 60)),
        "sync": raised(lambda: rig.manager.sync(61, "adapter")),
        "seconds": time.monotonic() - started,
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


def pairs(left: list, right: list) -> list[tuple[Any, Any]]:
    """Pair the completions of two calls."""
    return [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]


def main(scenario: str, folder: str, out: str) -> None:
    scenarios = {"llama": llama, "qwen3": qwen3, "qwen2": qwen2}
    if scenario in ("moe", "merged", "merged_moe"):
        # Imported late: engine processes import this module too, and need no Megatron.
        from tests.e2e import sampler_merged
        from tests.e2e.sampler_moe import moe

        scenarios |= {"moe": moe, "merged": sampler_merged.dense, "merged_moe": sampler_merged.experts}
    results = scenarios[scenario](Path(folder))
    Path(out).write_text(json.dumps(results, default=float, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
