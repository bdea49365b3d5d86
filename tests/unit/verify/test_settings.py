# SPDX-License-Identifier: Apache-2.0
"""Turn the command's arguments into a config, and report mistakes at once."""

import json
import subprocess
import sys

import pytest

from megarl.cli.main import main
from megarl.errors import ConfigError, UnsupportedError
from megarl.verify.inputs.samples import LONG
from megarl.verify.inputs.settings import verify_config, verify_tree
from tests.helpers.models import SHAPE as SIZES

SHAPE = {"model_type": "llama", **SIZES}


@pytest.fixture
def model(tmp_path):
    """Make a folder with only a config; these tests need no more."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def test_defaults_are_fp32_three_updates_and_several_micro_batches(model):
    config = verify_config(model)
    assert (config.model.dtype, config.train.steps, config.train.learning_rate) == ("float32", 3, 5e-4)
    assert config.parallel.world_size == 1
    assert LONG <= config.train.micro_batch_tokens < 2 * LONG


def test_overrides_are_the_run_configs_keys(model):
    config = verify_config(model, ["parallel.tensor=2", "lora.target_modules=[q_proj]", "model.dtype=bfloat16"])
    assert (config.parallel.tensor, config.lora.target_modules, config.model.dtype) == (2, ["q_proj"], "bfloat16")


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("sampler.temperature=2.0", ConfigError, "section of the override 'sampler.temperature=2.0'"),
        ("paralel.tensor=2", ConfigError, "did you mean 'parallel'"),
        ("parallel.tensr=2", ConfigError, "did you mean 'tensor'"),
        ("parallel.tensor=3", ConfigError, r"must divide the model's num_attention_heads \(4\)"),
        ("parallel.virtual_pipeline=2", ConfigError, "needs parallel.pipeline > 1"),
        ("model.path=/elsewhere", ConfigError, "the model is the command's first argument"),
        ("lora.lora_dropout=0.1", ConfigError, "verify needs 0"),
        ("train.micro_batch_tokens=8", ConfigError, "must hold the longest sequence"),
        ("model.dtype=float16", ConfigError, "model.dtype"),
    ],
)
def test_a_mistake_names_the_key(model, override, error, message):
    with pytest.raises((error, UnsupportedError) if error is ConfigError else error, match=message):
        verify_config(model, [override])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "is not a folder"),
        (["MODEL", "parallel.tensor=3"], "num_attention_heads"),
        (["MODEL", "parallel.expert=2"], "the model has no experts"),
        (["MODEL", "--ranks", "2"], "--ranks is for --matrix"),
        (["MODEL", "--matrix", "--ranks", "0"], "at least 1"),
        (["MODEL", "--layouts", "TP2*"], "--layouts is for --matrix"),
        (["MODEL", "--matrix", "--layouts", " , "], "which names none"),
        (["MODEL", "--matrix", "parallel.tensor=2"], "which runs all layouts"),
        (["MODEL", "--matrix", "lora.init_from=/some"], "does not fit a tiny model"),
        (["MODEL", "--out", "/nowhere/table.md"], "the folder '/nowhere' does not exist"),
        (["MODEL", "--out", "/tmp"], "--out is '/tmp', which is a folder; name a file"),
        (["MODEL", "train.steps=2", "--json", "train.stepz=3"], "did you mean 'steps'"),
    ],
)
def test_bad_arguments_exit_2_with_one_message(model, capsys, arguments, message):
    assert main(["verify", *(model if text == "MODEL" else text for text in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_mistake_is_told_before_anything_heavy_is_imported(model):
    code = (
        "import sys\nfrom megarl.cli.main import main\n"
        f"status = main(['verify', {model!r}, 'parallel.tensor=3', '--json'])\n"
        "print(status, sorted({'torch', 'megatron', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"


def test_a_callers_change_of_the_config_does_not_reach_the_next(model):
    for full in (True, False):
        verify_tree(model, full=full)["train"]["overlap_grad_reduce"] = True
        assert "overlap_grad_reduce" not in verify_tree(model, full=full)["train"]
