# SPDX-License-Identifier: Apache-2.0
"""Test the `megarl` command: quick, and helpful on misuse."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megarl
from megarl.cli.arguments import parse, split_overrides
from megarl.cli.main import main, parser
from megarl.config import dump_config, load_config
from megarl.config.changes import changes, setting_names
from megarl.config.run import RunConfig
from tests.helpers.models import make_model

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/arithmetic/run.yaml"
HEAVY = {
    "torch",
    "pydantic",
    "omegaconf",
    "numpy",
    "rich",
    "yaml",
    "ray",
    "transformers",
    "megatron",
    "psutil",
    "socket",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command_line") / "model"
    make_model(folder, "qwen3", tied=True)
    return folder


@pytest.mark.parametrize("arguments", ["['--help']", "['train', '--help']", "['verify', '--help']", "['--version']"])
def test_help_imports_nothing_that_takes_time(arguments):
    code = (
        "import sys\nfrom megarl.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_help_names_every_command_and_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for command in ("train", "resume", "config", "report", "export", "bench", "verify", "completion"):
        assert re.search(rf"\n    {command}\s+\w", text)  # with its line of help
        assert f"megarl {command} " in text  # in an example
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "run.yaml"], "unknown command 'trian'; did you mean 'train'? (known: train, resume, config"),
        (["zzz"], "unknown command 'zzz' (known: train"),
        (["train", "run.yaml", "--verbose"], "unrecognized arguments: --verbose"),
        (["export", "run", "--format", "peft", "--out", "x", "train.steps=2"], "unrecognized arguments: train.steps=2"),
    ],
)
def test_a_wrong_command_line_is_one_message_with_the_nearest_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.steps=2", "lora.r=8"],
        ["--train.steps=2", "lora.r=8"],
        ["--train.steps", "2", "--lora.r=8"],
    ],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_overrides_may_have_dashes_and_stand_anywhere(arguments, place):
    line = ["train", "run.yaml", *arguments] if place == "after" else ["train", *arguments, "run.yaml"]
    parsed = parse(parser(), line)
    assert (parsed.recipe, parsed.overrides) == ("run.yaml", ["train.steps=2", "lora.r=8"])


def test_prompts_and_targets_may_follow_options():
    parsed = parse(parser(), ["sample", "run", "--temperature", "0", "What is a=3?", "sampler.seed=1", "And 4?"])
    assert parsed.prompts == ["What is a=3?", "And 4?"] and parsed.overrides == ["sampler.seed=1"]
    parsed = parse(parser(), ["eval", "run", "--task", "arithmetic", "other"])
    assert parsed.sources == ["run", "other"] and parsed.overrides == []


def test_options_are_no_overrides_and_a_benchs_keys_have_no_dots():
    parsed = parse(
        parser(), ["bench", "train", "tiny", "steps=1", "--profile", "--sequences=2", "--out=x", "length=64"]
    )
    assert parsed.overrides == ["steps=1", "--sequences=2".removeprefix("--"), "length=64"]
    assert (parsed.profile, parsed.out) == (True, "x")
    assert split_overrides(["runs/a.b=3/run.yaml", "task.options.min=1"]) == (
        ["runs/a.b=3/run.yaml"],
        ["task.options.min=1"],
    )


def test_config_shows_every_setting_and_marks_what_differs(model, tmp_path, capsys):
    overrides = [f"model.path={model}", "--lora.r=4", "task.options.min=2"]
    assert main(["config", str(RECIPE), *overrides]) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    config = load_config(RECIPE, [f"model.path={model}", "lora.r=4", "task.options.min=2"])
    assert load_config(tmp_path / "shown.yaml") == config
    lines = {line.strip() for line in text.splitlines()}
    assert {"r: 4  # default: 16", "name: arithmetic  # required", "lora_dropout: 0.0"} <= lines
    assert main(["config", str(RECIPE), *overrides, "--changed"]) == 0
    changed = yaml.safe_load(capsys.readouterr().out)
    assert changed == changes(config)
    assert changed["lora"]["r"] == 4
    assert "lora_dropout" not in changed["lora"]
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
    assert load_config(tmp_path / "changed.yaml") == config


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_script_is_the_shells_and_knows_the_settings(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(f"{name}=" in script for name in setting_names(RunConfig))
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_bash_completes_commands_and_settings(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    ask = """
complete_line() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_megarl; echo "${COMPREPLY[*]}"; }
complete_line megarl tra
complete_line megarl train run.yaml lora.lora_a
"""
    done = subprocess.run(["bash"], input=capsys.readouterr().out + ask, text=True, capture_output=True)
    assert done.stdout.splitlines() == ["train", "lora.lora_alpha="], done.stderr


def test_a_variable_that_is_not_set_is_named_with_the_way_around_it(monkeypatch, capsys):
    monkeypatch.delenv("MEGARL_MODEL", raising=False)
    assert main(["config", str(RECIPE)]) == 2
    message = "key 'model.path': the environment variable MEGARL_MODEL is not set; set it, or give model.path=VALUE"
    assert message in capsys.readouterr().err


def test_an_adapter_is_exported_without_torch(model, tmp_path):
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    config = load_config(RECIPE, [f"model.path={model}"])
    (run / "config.yaml").write_text(dump_config(config))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run / "adapter" / name).write_text(name)
    code = (
        "import sys\nfrom megarl.cli.main import main\n"
        f"status = main(['export', {str(run)!r}, '--format', 'peft', '--out', {str(tmp_path / 'out')!r}])\n"
        "print(status, sorted({'torch', 'transformers', 'peft', 'megatron', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(tmp_path / "out"), "0 []"]
    assert (tmp_path / "out" / "adapter_model.safetensors").read_text() == "adapter_model.safetensors"
