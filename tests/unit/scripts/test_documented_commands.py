# SPDX-License-Identifier: Apache-2.0
"""Test that `megarl` accepts the commands of the pages: their flags, settings and layouts. None is run."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.bench.looping.settings import parse_loop_settings
from megarl.bench.rollouts.settings import parse_rollout_settings
from megarl.bench.syncing.settings import parse_sync_settings
from megarl.bench.training.settings import parse_settings
from megarl.cli.arguments import parse
from megarl.cli.main import parser
from megarl.cli.resume import load_run_config
from megarl.verify.command import matrix_layouts, tiny_config
from megarl.verify.inputs.settings import verify_config
from tests.gpu.models import FAMILIES, SMALL_MOE
from tests.unit.scripts.test_docs import PAGES, ROOT

# What `tests.gpu.models` writes, which the pages verify.
MODELS = FAMILIES | {"small-moe": SMALL_MOE}
# What the pages write in place of settings.
SETTINGS = {
    "SWITCHES": "train.distributed_optimizer=true train.overlap_grad_reduce=true train.overlap_param_gather=true",
    "BACKEND": "local",
    "DTYPE": "float32",
    "SHAPE": "tiny",
}
BENCHES = {
    "train": parse_settings,
    "sync": parse_sync_settings,
    "rollout": parse_rollout_settings,
    "loop": parse_loop_settings,
}


def commands() -> Iterator[str]:
    """Yield the commands in blocks and in running text, without those that only show how one is formed."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^    (?:\S+=\S+ )*(megarl [^#\n]*[^#\s])", text, re.MULTILINE)
        inline = [" ".join(one.split()) for one in re.findall(r"`(megarl [^`]+)`", text)]
        for command in {*blocks, *(one for one in inline if re.search(r"\w=\w", one))}:
            if "..." not in command and not re.search(r"\w\|\w|\[RUN|\[--|RECIPE", command):
                yield command


COMMANDS = sorted(set(commands()))


def folder_of(path: str, root: Path) -> str:
    """Make a folder with the config.json of the model that a path is named after, else of Qwen3; return it."""
    name = Path(path).name
    MODELS.get(name, MODELS["qwen3"]).save_pretrained(root / name)
    return str(root / name)


def with_settings(command: str) -> list[str]:
    """Return the command's words, with settings for what stands in their place, and without its brackets."""
    for name, settings in SETTINGS.items():
        command = command.replace(name, settings)
    return shlex.split(re.sub(r" \[(\w+\.\w+=[^\]]*)\]", r" \1", command))[1:]


def test_the_pages_have_commands_of_every_kind() -> None:
    words = {tuple(command.split()[1:3]) for command in COMMANDS}
    assert {("bench", kind) for kind in BENCHES} <= words
    assert {"train", "verify", "eval", "export", "report", "sample", "serve"} <= {first for first, *_ in words}
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIERS_VENV", str(tmp_path))  # which examples/verifiers asks for
    words = with_settings(command)
    arguments = parse(parser(), words)
    if words[0] == "train":
        check_train(arguments, tmp_path)
    elif words[0] == "bench":
        BENCHES[words[1]](arguments.model, arguments.overrides)
    elif words[0] == "verify":
        check_verify(arguments, tmp_path)


def check_train(arguments: argparse.Namespace, root: Path) -> None:
    """Load the recipe with the command's settings; a path of a model is one that exists."""
    changes = [
        f"model.path={folder_of(one, root)}" if one.startswith("model.path=/path/to") else one
        for one in arguments.overrides
    ]
    load_run_config(ROOT / arguments.recipe, changes)


def check_verify(arguments: argparse.Namespace, root: Path) -> None:
    """Form the config, and the layouts of a matrix."""
    config = verify_config(folder_of(arguments.model, root), arguments.overrides)
    if arguments.matrix:
        layouts, _ = matrix_layouts(tiny_config(config, root / "tiny"), arguments.ranks or 4)
        assert len(layouts) > 1
