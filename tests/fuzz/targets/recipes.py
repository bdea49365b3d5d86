# SPDX-License-Identifier: Apache-2.0
"""Recipe texts and overrides: a named error, or the values that are written there."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import yaml

from megarl.cli.resume import load_run_config
from megarl.config import check_run, dump_config, load_config
from megarl.launch.names import check_model, check_names, with_absolute_paths
from megarl.launch.placement.plan import Node, plan_placement
from megarl.launch.run import make_stream, run_folder
from megarl.tasks import TaskContext, build_task
from megarl.tasks.held_out import training_part
from tests.fuzz.harness import Mutation, WrongResult
from tests.fuzz.mutate import ODD, bytes_of, yaml_of
from tests.helpers.models import make_model
from tests.helpers.train_run import RECIPE, REWARD

OVERRIDES = "overrides.json"


class Recipes:
    """A recipe, its reward and overrides, read up to the point at which processes would be started."""

    def make(self, folder: Path) -> None:
        model = make_model(folder.parent / "model", "qwen3", tied=True, head_dim=32)  # vLLM on CPUs does not support 16
        tree = yaml.safe_load(RECIPE.replace("MODEL", str(model)))
        # All settings, so that each of them is changed at some time.
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        (folder / "reward.py").write_text(REWARD)
        (folder / OVERRIDES).write_text("[]")
        full = yaml.safe_load(dump_config(load_config(folder / "recipe.yaml")))
        full["task"]["options"] = {"min": 1, "max": 20, "operands": 2, "operators": ["+"], "size": 50}
        full["train"]["output"] = "runs"
        (folder / "recipe.yaml").write_text(yaml.safe_dump(full, sort_keys=False))
        self._full = full

    def mutate(self, folder: Path, draw: Random) -> Mutation:
        kind = draw.choice(["tree", "tree", "tree", "override", "override", "bytes", "reward"])
        if kind == "tree":
            return yaml_of(folder / "recipe.yaml", draw)
        if kind == "bytes":
            return bytes_of(folder / "recipe.yaml", draw)
        if kind == "reward":
            return bytes_of(folder / "reward.py", draw)
        section = draw.choice(sorted(self._full))
        key = draw.choice(sorted(self._full[section]))
        value = draw.choice(ODD)
        text = draw.choice([f"{section}.{key}={value}", f"{section}.{key}={json.dumps(value)}", f"{section}={value}"])
        (folder / OVERRIDES).write_text(json.dumps([text]))
        return Mutation(f"override {text[:80]!r}")

    def check(self, folder: Path) -> None:
        overrides = json.loads((folder / OVERRIDES).read_text())
        output = folder / "runs"
        config = with_absolute_paths(load_run_config(folder / "recipe.yaml", overrides), folder)
        check_names(config)
        check_model(config)
        config = config.model_copy(
            update={
                "train": config.train.model_copy(
                    update={"output": _inside(config.train.output, output), "resume": None}
                )
            }
        )
        check_run(config)
        task = build_task(TaskContext(config.task, folder, config.train.seed))
        make_stream(config, training_part(task, config.task.held_out), None)
        plan_placement(config, [Node("id", "host", gpus=0, cpus=64, cores=64)])
        made = run_folder(config)
        saved = made / "config.yaml"
        saved.write_text(dump_config(config))
        for pattern in (config.lora.target_modules, *config.lora.rank_pattern, *config.lora.alpha_pattern):
            if isinstance(pattern, str) and not _compiles(pattern):
                raise WrongResult(f"{pattern!r} is no regular expression")
        if load_config(saved) != config:
            raise WrongResult("the config that is saved reads back as another")
        if not overrides:
            _compare(config.model_dump(), yaml.load((folder / "recipe.yaml").read_text(), yaml.CSafeLoader))


def _inside(path: str, output: Path) -> str:
    """Move relative and empty paths below the case's own folder; keep others."""
    return path if path.startswith(("/", "~")) else str(output / path)


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


def _compare(loaded: Any, written: Any, path: str = "") -> None:
    """Check that the config holds the values of the recipe, with paths made absolute."""
    if isinstance(written, dict) and isinstance(loaded, dict):
        for key, value in written.items():
            _compare(loaded.get(key), value, f"{path}.{key}" if path else str(key))
    elif isinstance(written, list) and isinstance(loaded, list) and len(written) == len(loaded):
        for number, pair in enumerate(zip(loaded, written, strict=True)):
            _compare(*pair, f"{path}.{number}")
    elif path not in ("model.path", "lora.init_from", "task.path", "task.reward", "train.output", "train.resume") and (
        loaded != written or (type(loaded) is not type(written) and not {type(loaded), type(written)} <= {int, float})
    ):
        raise WrongResult(f"{path} is {loaded!r}, but {written!r} is written")
