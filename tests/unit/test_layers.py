# SPDX-License-Identifier: Apache-2.0
"""Imports flow one way (docs/design.md). Every import counts: in functions, under TYPE_CHECKING, through importlib."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megarl"

# Parts that all of megarl may import.
COMMON = {
    "types",
    "errors",
    "config",
    "cuda_memory",
    "families",
    "files",
    "folder_lock",
    "forks",
    "futures",
    "hub",
    "network",
    "plugins",
    "progress",
    "run_folder",
    "triton_support",
}

SAMPLING = COMMON | {
    "peft",
    "checkpoint_engine.wire",
    "checkpoint_engine.records",
    "checkpoint_engine.choice",
    "checkpoint_engine.receiver*",
    "sampler.environment",
    "sampler.seeds",
}
MEASURED = COMMON | {"parallel", "loss", "model", "lora", "build", "checkpoint_engine", "sampler"}

# Part -> the other parts that it may import. The longest name that fits a module counts.
INTERNAL: dict[str, set[str]] = {
    "types": {"errors"},
    "cuda_memory": set(),
    "errors": set(),
    "files": {"errors"},
    "folder_lock": {"errors", "files"},
    "forks": set(),
    "futures": {"errors"},
    "hub": {"config", "errors", "files"},
    "network": set(),
    "plugins": {"errors", "files"},
    "progress": set(),
    "run_folder": {"config", "errors", "files"},
    "triton_support": set(),
    "torch_addons": set(),
    "families": {"errors", "plugins"},
    "config": {"errors", "families", "files", "config"},
    "config.sections": {"errors", "config.base"},
    "parallel": COMMON,
    "bitwise": COMMON,
    "loss": COMMON | {"bitwise"},
    "peft": COMMON,
    "model": COMMON | {"parallel", "loss", "model", "peft", "checkpoint_engine.mixin"},
    "model.weights": COMMON | {"parallel", "peft"},
    "model.layers": COMMON | {"parallel", "model.weights", "bitwise"},
    "model.step": COMMON | {"parallel", "loss", "model.layers", "model.weights"},
    "model.optimizer": COMMON | {"parallel"},
    "lora": COMMON | {"parallel", "model", "peft", "bitwise"},
    "hf": COMMON | {"parallel", "loss", "model", "lora", "peft"},
    "hf.inspection": COMMON | {"build", "hf", "model.weights", "peft"},
    "build": COMMON | {"parallel", "model", "lora", "hf", "peft"},
    "tasks": COMMON,
    "environments": COMMON | {"tasks"},
    "tokenizer": {"errors"},
    "checkpoint_engine": COMMON | {"checkpoint_engine", "peft"},  # senders
    "checkpoint_engine.wire": COMMON,
    "checkpoint_engine.buckets": COMMON
    | {"checkpoint_engine.wire", "checkpoint_engine.records", "checkpoint_engine.base", "checkpoint_engine.kernels"},
    "checkpoint_engine.records": COMMON | {"checkpoint_engine.wire"},
    "sampler": SAMPLING | {"sampler.engine", "sampler.drawing"},
    "sampler.engine": SAMPLING,
    "sampler.drawing": SAMPLING | {"sampler.engine"},
    # vLLM imports it in its workers, by name.
    "sampler.worker": SAMPLING | {"bitwise", "sampler.drawing.fetched_logprobs"},
    "sampler.plain": SAMPLING,
    "report": COMMON,
    "evaluation": COMMON | {"tasks"},
    "controller": COMMON
    | {
        "report",
        "evaluation",
        "parallel",
        "loss",
        "model",
        "lora",
        "tasks",
        "environments",
        "checkpoint_engine",
        "sampler",
        "controller",
    },
    "controller.actors": COMMON
    | {"parallel", "loss", "model", "lora", "hf", "build", "peft", "checkpoint_engine", "sampler"},
    "controller.rollouts": COMMON
    | {"loss.advantages", "tasks", "environments", "evaluation", "sampler.seeds", "controller.actors", "tokenizer"},
    "controller.trackers": COMMON | {"report"},
    "controller.recording": COMMON
    | {"model.checkpoint.digests", "evaluation", "report", "checkpoint_engine.phases"}
    | {"controller.actors", "controller.rollouts", "controller.trackers"},
    "launch.nodes": COMMON | {"launch.processes"},
    "launch.placement": COMMON | {"launch.processes"},
    "launch": COMMON
    | {
        "launch",
        "parallel",
        "loss",
        "model",
        "lora",
        "hf.inspection",
        "tasks",
        "checkpoint_engine",
        "sampler",
        "controller",
        "evaluation",
        "tokenizer",
    },
    "bench": MEASURED,
    "bench.training": MEASURED | {"bench"},
    "bench.syncing": MEASURED | {"bench", "verify.launch"},
    "bench.rollouts": MEASURED | {"bench"},
    "bench.looping": MEASURED | {"bench", "launch.processes"},
    "verify": COMMON | {"parallel", "loss", "model", "lora", "hf", "build", "peft"},
    "cli": COMMON
    | {"parallel", "loss", "model", "lora", "tasks", "checkpoint_engine", "sampler", "controller", "launch"}
    | {"bench", "verify", "report", "evaluation", "tokenizer"},
}

# Package -> the only parts that may import it (a trailing * stands for any ending).
ONLY_UNDER: dict[str, set[str]] = {
    "megatron": {"parallel", "model", "lora"},
    "vllm": {"sampler", "checkpoint_engine.receiver*"},
    "ray": {"controller", "launch"},
}

# Part -> packages that it must not import, to stay light.
NEVER: dict[str, set[str]] = {
    part: {"torch", "transformers", "peft", "megatron", "vllm", "ray"}
    for part in (
        "types",
        "errors",
        "families",
        "files",
        "folder_lock",
        "futures",
        "hub",
        "network",
        "run_folder",
        "torch_addons",
        "config",
        "tasks",
        "environments",
        "report",
        "evaluation",
    )
}


def is_under(module: str, place: str) -> bool:
    """Return True if ``module`` is ``place`` or is below it."""
    if place.endswith("*"):
        return module.startswith(place[:-1])
    return module == place or module.startswith(place + ".")


def longest_fit(module: str, places: dict[str, set[str]]) -> str | None:
    """Return the longest of ``places`` that holds ``module``."""
    return max((place for place in places if is_under(module, place)), key=len, default=None)


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of every import in ``source``; ``module`` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + is_package
                base = ".".join([*parts[:keep], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(package: Path) -> list[str]:
    """Return ``file:line: problem`` for every import in the package ``package`` that the tables forbid."""
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = list(file.relative_to(package).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        full = ".".join([package.name, module] if module else [package.name])
        for line, target in imported(file.read_text(), full, is_package):
            problem = verdict(module, target, package.name)
            if problem:
                found.append(f"{file.relative_to(package)}:{line}: {problem}")
    return found


def verdict(module: str, target: str, package: str) -> str | None:
    """Return the problem of ``module`` (relative to the package) importing ``target`` (absolute), or None."""
    part = longest_fit(module, INTERNAL)
    if target == package or target.startswith(package + "."):
        inside = target[len(package) + 1 :]
        to = longest_fit(inside, INTERNAL)
        if part is None or to is None or to == part or any(is_under(inside, place) for place in INTERNAL[part]):
            return None
        return f"{part} may not import {inside}"
    top = target.partition(".")[0]
    if top in ONLY_UNDER and not any(is_under(module, place) for place in ONLY_UNDER[top]):
        return f"{top} may only be imported under {', '.join(sorted(ONLY_UNDER[top]))}"
    if part in NEVER and top in NEVER[part]:
        return f"{part} may not import {top}"
    return None


def test_every_part_of_megarl_is_in_the_table():
    parts = {file.stem for file in PACKAGE.glob("*.py") if file.stem != "__init__"}
    parts |= {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert parts <= {name.partition(".")[0] for name in INTERNAL}


def test_megarl_keeps_the_import_arrows():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("tasks/new.py", "def f():\n    import torch.nn\n", "new.py:2: tasks may not import torch"),
        ("tasks/new.py", "import importlib\nx = importlib.import_module('torch')\n", "tasks may not import torch"),
        ("tasks/new.py", "from megarl.controller import loop\n", "tasks may not import controller.loop"),
        ("tasks/new.py", "from ..sampler import base\n", "tasks may not import sampler.base"),
        ("tasks/__init__.py", "from .. import model\n", "tasks may not import model"),
        ("config/run.py", "from typing import *\nif TYPE_CHECKING:\n    import vllm\n", "vllm may only be"),
        ("types.py", "import megarl.config.run\n", "types may not import config.run"),
        ("loss/new.py", "from megatron.core import parallel_state\n", "megatron may only be imported under"),
        ("loss/new.py", "import megarl.parallel.groups\n", "loss may not import parallel.groups"),
        (
            "model/new.py",
            "from megarl.lora.layers.parallel_linear import X\n",
            "model may not import lora.layers",
        ),
        ("model/new.py", "class A:\n    def f(self):\n        import ray\n", "new.py:3: ray may only be imported"),
        ("checkpoint_engine/transports/shm.py", "from vllm import LLM\n", "vllm may only be imported under"),
        ("checkpoint_engine/wire.py", "from megarl.checkpoint_engine.transports.shm import X\n", "wire may not import"),
        ("checkpoint_engine/manager.py", "from megarl.sampler import base\n", "checkpoint_engine may not import"),
        ("sampler/new.py", "import ray\n", "ray may only be imported under controller, launch"),
        ("sampler/new.py", "from megarl.model import gpt\n", "sampler may not import model.gpt"),
        (
            "sampler/new.py",
            "import megarl.checkpoint_engine.transports.shm\n",
            "sampler may not import checkpoint_engine.transports.shm",
        ),
        ("controller/new.py", "from megarl.cli import main\n", "controller may not import cli.main"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, problem):
    planted = tmp_path / "megarl" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    found = violations(tmp_path / "megarl")
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tasks/new.py", "import numpy\nfrom megarl.types import Prompt\nfrom .base import Task\n"),
        (
            "checkpoint_engine/receiver/adapter_plan.py",
            "from vllm.lora import x\nfrom megarl.checkpoint_engine import wire\n",
        ),
        ("lora/new.py", "from megatron.core import x\nfrom megarl.model.layers.gpt import y\nimport peft, torch\n"),
        ("controller/new.py", "import ray\nfrom megarl.tasks import build_task\n"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path, file, source):
    allowed = tmp_path / "megarl" / file
    allowed.parent.mkdir(parents=True)
    allowed.write_text(source)
    assert violations(tmp_path / "megarl") == []
