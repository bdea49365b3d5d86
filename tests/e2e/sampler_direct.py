# SPDX-License-Identifier: Apache-2.0
"""The scenario ``direct`` of ``sampler_scenarios``: weights written straight into parameters, as on GPUs."""

import os
from pathlib import Path
from typing import Any

import torch

from megarl.config import CheckpointEngineConfig
from tests.e2e.plain_layout import PLAIN
from tests.e2e.sampler_merged import LORA as PARTIAL
from tests.e2e.sampler_merged import MergingTrainer, change
from tests.e2e.sampler_moe import BASE_FAULTS, FileTrainer, new_base, refused
from tests.e2e.sampler_rig import LORA, Rig, make_model, prompts, raised, run_config

# MiB of a bucket: a tenth of the embedding, so that it and the larger linears travel in parts.
BUCKET = 1 / 64


def direct(folder: Path) -> dict[str, Any]:
    """Run an engine for merged weights and one for adapters, of tied Qwen3, and one of a mixture of experts."""
    os.environ[PLAIN] = "1"
    make_model("qwen3", folder)
    results = {content: versions(folder, content) for content in ("merged", "adapter")}
    return results | {"mixture": mixture(folder / "mixture")}


def mixture(folder: Path) -> dict[str, Any]:
    """Sync two bases and adapters on them, and damaged bases in between."""
    section = {"transport": "ipc", "timeout_seconds": 60.0}
    rig = Rig(run_config(folder, lora={"r": 4}, checkpoint_engine=section), FileTrainer("qwen3_moe", folder))
    try:
        rig.manager.sync(0, "base")
        rig.trainer.randomise(1)
        rig.manager.sync(1, "adapter")
        results: dict[str, Any] = {"error": rig.error(rig.generate(prompts(4), 1))}
        results["faults"] = {name: refused(rig, edit, "base") for name, edit in BASE_FAULTS.items()}
        return results | new_base(rig, 2)
    finally:
        rig.call(rig.sampler.close())


def versions(folder: Path, content: str) -> dict[str, Any]:
    """Sync base and three versions, which must be PEFT's; damage a fourth and a base, and bring all back."""
    section = {"content": content, "transport": "ipc", "timeout_seconds": 60.0}
    rig = Rig(
        run_config(folder, checkpoint_engine=section), MergingTrainer(folder, PARTIAL if content == "merged" else LORA)
    )
    rig.config = rig.config.model_copy(
        update={"checkpoint_engine": CheckpointEngineConfig(**section).model_copy(update={"bucket_mib": BUCKET})}
    )
    rig.renew()
    try:
        results: dict[str, Any] = {"errors": [], "errors_of_previous": []}
        results["base"] = rig.manager.sync(0, "base").count
        for version in range(3):
            rig.trainer.randomise(version)
            rig.manager.sync(version, content)
            drawn = rig.generate(prompts(4), version)
            results["errors"].append(rig.error(drawn))
            rig.trainer.randomise(version - 1)
            results["errors_of_previous"].append(rig.error(drawn))
        norm = "model.layers.1.input_layernorm.weight"
        embedding = "model.embed_tokens.weight"
        results["faults"] = {}
        for name, edit in {
            "missing": lambda named: [pair for pair in named if pair[0] != norm],
            "unknown": lambda named: [*named, (norm.replace("layers.1", "layers.7"), named[0][1])],
            "wrong_shape": change(embedding, lambda tensor: tensor[:-1].contiguous()),
            "nan": change(embedding, lambda tensor: torch.full_like(tensor, torch.nan)),
        }.items():
            rig.trainer.edit = edit
            results["faults"][name] = [raised(lambda: rig.manager.sync(3, "base"))]
            results["faults"][name].append(raised(lambda: rig.generate(prompts(1), 2)))
            rig.trainer.edit = lambda named: named
            rig.renew(base_ready=False)
        rig.manager.sync(3, "base")
        rig.trainer.randomise(3)
        rig.manager.sync(3, content)
        results["again"] = rig.error(rig.generate(prompts(4), 3))
        return results
    finally:
        rig.call(rig.sampler.close())
