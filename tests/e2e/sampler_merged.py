# SPDX-License-Identifier: Apache-2.0
"""Scenarios of ``sampler_scenarios``: merged weights in engines without LoRA. PEFT merges, megarl brings."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint_engine.base import TRANSPORTS
from megarl.config import CheckpointEngineConfig
from megarl.lora.merge import merge_folder
from megarl.model.weight_export import block_of
from tests.e2e.sampler_moe import FileTrainer
from tests.e2e.sampler_moves import moves
from tests.e2e.sampler_rig import PeftTrainer, Rig, make_model, prompts, raised, run_config

MERGED = {"content": "merged"}
# A part of what vLLM fuses, and no norm: only attention and MLP change.
LORA = {"r": 8, "lora_alpha": 24, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
# Long enough for several blocks of the prefix cache, which hold 32 tokens on a CPU.
PROMPT = [np.arange(10, 106)]
VERSIONS = 20


class MergingTrainer(PeftTrainer):
    """Exports what PEFT's own merge gives."""

    def export_merged(self, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        merged = copy.deepcopy(self.model).merge_and_unload()
        changed = {block_of(f"model.layers.{layer}.{block}.") for layer in range(2) for block in ("self_attn", "mlp")}
        yield from self.edit(
            [(n, p) for n, p in merged.named_parameters() if not changed_only or block_of(n) in changed]
        )


class MergingFileTrainer(FileTrainer):
    """Exports the folder that ``megarl export --format merged`` writes; the reference is PEFT with the adapter."""

    def export_merged(self, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        out = self.folder / f"merged-{self.version}"
        shutil.rmtree(out, ignore_errors=True)
        merge_folder(self.folder, self.adapter, out)
        blocks = {block_of(name.removeprefix("base_model.model.").partition(".lora_")[0]) for name in self.adapted()}
        yield from self.edit(
            [pair for pair in load_file(out / "model.safetensors").items() if block_of(pair[0]) in blocks]
        )

    def randomise(self, seed: int, targets: Any = "all-linear", parameters: Any = None) -> None:
        if "lm_head" not in targets:
            super().randomise(seed, targets, parameters)
            return
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(base, config).save_pretrained(self.adapter, save_embedding_layers=False)
        vars(self).pop("model", None)

    def adapted(self) -> list[str]:
        return list(load_file(self.adapter / "adapter_model.safetensors"))


def dense(folder: Path) -> dict[str, Any]:
    """Tied Qwen3: versions, the prefix cache, requests in flight, faults."""
    make_model("qwen3", folder)
    trainer = MergingTrainer(folder, LORA)
    rig = Rig(run_config(folder, checkpoint_engine=MERGED), trainer)
    try:
        results: dict[str, Any] = {"before_base": raised(lambda: rig.manager.sync(0, "merged"))}
        restart(rig)
        results |= versions(rig)
        results |= stale(rig)
        results["moves"] = moves(rig, "merged")
        results |= in_flight(rig)
        results["adapter"] = refused(rig, lambda named: named, "adapter")
        results["faults"] = {name: refused(rig, edit) for name, edit in FAULTS.items()}
        TRANSPORTS["flipping"] = "tests.e2e.faulty_transport"
        results["faults"]["flipped_byte"] = refused(rig, lambda named: named, transport="flipping")
        trainer.policy_version = lambda: trainer.version + (trainer.version == 41)  # it counts another step
        results["faults"]["wrong_version"] = refused(rig, lambda named: named)
        return results
    finally:
        rig.call(rig.sampler.close())


def restart(rig: Rig) -> None:
    """Bring base and policy as to a new engine."""
    rig.trainer.edit = lambda named: named
    rig.renew(base_ready=False)
    rig.manager.sync(0, "base")


def versions(rig: Rig) -> dict[str, Any]:
    """Check that each version answers as PEFT does, and differs from the previous one."""
    results: dict[str, Any] = {"errors": [], "errors_of_previous": [], "counts": [], "held": []}
    for version in range(3):
        rig.trainer.randomise(version)
        results["counts"].append(rig.manager.sync(version, "merged").count)
        drawn = rig.generate(prompts(4), version)
        results["errors"].append(rig.error(drawn))
        results["held"].append(rig.call(rig.sampler._link.engine().compute_weight_checksums()))
        rig.trainer.randomise(version - 1)
        results["errors_of_previous"].append(rig.error(drawn))
    results["wrong_version"] = raised(lambda: rig.generate(prompts(1), 1))
    results["stamps"] = sorted({int(v) for group in drawn for one in group for v in one.versions})
    return results


def stale(rig: Rig) -> dict[str, Any]:
    """Ask the same prompt under many versions, whose keys and values vLLM caches; then without emptying its cache."""
    errors = []
    for version in range(10, 10 + VERSIONS):
        rig.trainer.randomise(version)
        rig.manager.sync(version, "merged")
        errors.append(rig.error(rig.generate(PROMPT, version)))
    engine = rig.sampler._link.engine()
    empty = engine.reset_prefix_cache

    tries = []

    async def keep() -> bool:
        tries.append(0)
        return len(tries) > 1  # as if blocks were in use at the first

    engine.reset_prefix_cache = keep
    rig.trainer.randomise(30)
    rig.manager.sync(30, "merged")
    kept = rig.error(rig.generate(PROMPT, 30))
    engine.reset_prefix_cache = empty
    assert len(tries) == 2
    return {"prompt_tokens": len(PROMPT[0]), "errors_of_shared_prompt": errors, "error_with_kept_cache": kept}


def in_flight(rig: Rig) -> dict[str, Any]:
    """Sync while a version decodes: nothing is written, and the sampler refuses."""
    rig.manager.sync(31, "merged")
    running = rig.start(rig.sampler.generate(prompts(60), 31))
    while not rig.sampler.gate.in_flight:
        pass
    results = {"in_flight": raised(lambda: rig.manager.sync(32, "merged"))}
    return results | {"in_flight_ended": raised(lambda: running.result(60))}


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], list]:
    """Return an edit of one tensor of the export."""
    return lambda named: [(key, how(tensor) if key == name else tensor) for key, tensor in named]


QUERY, KEY = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
FAULTS: dict[str, Callable[[list], list]] = {
    "missing": lambda named: [pair for pair in named if pair[0] != KEY],
    "unknown": lambda named: [*named, (QUERY.replace("layers.1", "layers.7"), named[0][1])],
    "adapter_name": lambda named: [*named, (f"base_model.model.{QUERY}", named[0][1])],
    "wrong_shape": change(QUERY, lambda tensor: tensor[:-1].contiguous()),
    "nan": change(QUERY, lambda tensor: torch.full_like(tensor, torch.nan)),
}


def refused(rig: Rig, edit: Callable[[list], list], kind: Any = "merged", transport: str = "shm") -> list[str | float]:
    """Return what sync raises for an edited export, then generate; and the error after base and policy came again."""
    restart(rig)
    rig.manager.sync(40, "merged")
    rig.trainer.edit = edit
    rig.manager._config = CheckpointEngineConfig(transport=transport, **MERGED)
    outcome: list[str | float] = [raised(lambda: rig.manager.sync(41, kind))]
    outcome += [raised(lambda version=version: rig.generate(prompts(1), version)) for version in (40, 41)]
    # Answered only after the receive that the failure left running; its refusal belongs to the old gate.
    rig.call(rig.sampler.resident())
    restart(rig)
    rig.manager.sync(42, "merged")
    return [*outcome, rig.error(rig.generate(PROMPT, 42))]


def experts(folder: Path) -> dict[str, Any]:
    """Qwen3-MoE: experts, router and attention, twice; some projections; embeddings, which vLLM's LoRA cannot take."""
    trainer = MergingFileTrainer("qwen3_moe", folder)
    rig = Rig(run_config(folder, checkpoint_engine=MERGED), trainer)
    results: dict[str, Any] = {"errors": [], "errors_of_previous": [], "effects": []}
    try:
        rig.manager.sync(0, "base")
        parts = [("all-linear",), ("all-linear",), ([], ["gate_up_proj"]), (["lm_head", "embed_tokens"],)]
        for version, part in enumerate(parts, 1):
            trainer.randomise(version, *part)
            if version > 2:  # the engine holds weights of modules that this adapter leaves to the base
                results.setdefault("other_targets", raised(lambda version=version: rig.manager.sync(version, "merged")))
                rig.call(rig.sampler.resident())
                rig.renew(base_ready=False)
                rig.manager.sync(version, "base")
            rig.manager.sync(version, "merged")
            drawn = rig.generate(prompts(4, seed=version), version)
            results["errors"].append(rig.error(drawn))
            results["effects"].append(trainer.without_adapter(drawn))
            trainer.randomise(version - 1, "all-linear")
            results["errors_of_previous"].append(rig.error(drawn))
        return results
    finally:
        rig.call(rig.sampler.close())
