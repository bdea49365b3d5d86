# SPDX-License-Identifier: Apache-2.0
"""The scenario ``llama`` of ``sampler_scenarios``: versions, patterns, damaged syncs, leaks, a new base, death."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megarl.checkpoint_engine.manager import CLEANUP_SECONDS
from tests.e2e.sampler_damage import FAULTS, fault, flipped_byte
from tests.e2e.sampler_moves import moves
from tests.e2e.sampler_rig import LORA, PeftTrainer, Rig, make_model, overlapping, prompts, raised, run_config
from tests.helpers.processes import find_engine

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
        results |= overlapping(lambda count: score_first(rig, count), "score_overlapped")
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


def score_first(rig: Rig, count: int) -> dict[str, Any]:
    """Check that a canary's request begins before those that wait, with four times the sequences that run at once."""
    version = rig.sampler.version
    assert version is not None
    most = rig.config.sampler.max_num_seqs // rig.config.sampler.samples_per_prompt
    count = max(count, 4 * most)
    running = rig.start_requests(rig.sampler.generate(prompts(count), version), count)
    waiting = rig.sampler.gate.in_flight > 3 * most
    rig.call(rig.sampler.score(np.arange(20, 60), version))
    left = rig.sampler.gate.in_flight
    running.result(120)
    # Behind all others it would begin when the last ones run.
    return {"score_overlapped": waiting, "score_first": left > most + 1}


def third_version(rig: Rig, count: int) -> dict[str, Any]:
    """Check that two versions in use leave no slot for a third; an idle one frees its slot."""
    rig.manager.sync(100, "adapter")
    running = rig.start_requests(rig.sampler.generate(prompts(count), 100), count)
    rig.manager.sync(101, "adapter")
    began = time.monotonic()
    refused = raised(lambda: rig.manager.sync(102, "adapter"))
    # The sender is told, so that nobody waits until its time is over.
    at_once = time.monotonic() - began < CLEANUP_SECONDS
    # With no request left, version 100 would have made room. The refusal ends the requests, so ask for nothing else.
    overlapped = refused != "nothing"
    ended = raised(lambda: running.result(60))
    alive = rig.call(rig.sampler.resident())[0]
    rig.sampler.gate._refused = None
    rig.renew()
    rig.manager.sync(103, "adapter")
    results = {"third": refused, "third_overlapped": overlapped, "third_held": alive, "third_ended": ended}
    results["third_at_once"] = at_once
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


def many_versions(rig: Rig) -> dict[str, Any]:
    """Sync 50 versions in a row: nothing accumulates, and the base stays the same."""
    engine = rig.sampler._link.engine()
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
