# SPDX-License-Identifier: Apache-2.0
"""Write the recipe of a run that is measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.bench.looping.settings import LoopBenchSettings, Way
from megarl.config import load_config

# Tokens of a prompt of the task, at most, with the tokenizer of the named shapes.
PROMPT_TOKENS = 96


def recipe_of(settings: LoopBenchSettings, way: Way, model: Path, output: Path) -> dict[str, Any]:
    """Return the recipe, without overrides.

    Args:
        settings: what to measure.
        way: the way of sampling and training.
        model: folder of the model.
        output: folder that gets the run's folder.
    """
    completions = settings.prompts * settings.samples
    recipe: dict[str, Any] = {
        "model": {"path": str(model), "dtype": settings.dtype},
        "task": {"name": "arithmetic", "reward": "megarl.bench.looping.reward:reward"},
        "lora": {"r": settings.r, "lora_alpha": 2 * settings.r},
        "parallel": {"data": 1},
        "sampler": {
            "engines": 1,
            "samples_per_prompt": settings.samples,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": settings.response_tokens,
            "max_num_seqs": completions,
            "kv_cache_gib": settings.kv_cache_gib,
        },
        # In both ways, so that the later run finds what the first one's engine compiled: it depends on the LoRA slots.
        "checkpoint_engine": {"in_flight": "overlap"},
        "train": {
            "device": settings.device,
            "seed": settings.seed,
            "steps": settings.steps_of(way),
            "prompts_per_step": settings.prompts,
            "micro_batch_tokens": settings.micro_batch_tokens,
            "learning_rate": 1.0e-5,
            "save_every": settings.steps_of(way),
            "output": str(output),
        },
    }
    if way == "side":
        recipe["train"]["max_staleness"] = settings.staleness
    return recipe


def write_recipe(
    settings: LoopBenchSettings, overrides: Sequence[str], way: Way, model: Path, output: Path, file: Path
) -> None:
    """Write the recipe into a file, and check it with the overrides.

    Raises:
        ConfigError: an override is wrong.
    """
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(recipe_of(settings, way, model, output))))
    load_config(file, overrides)
