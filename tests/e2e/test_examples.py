# SPDX-License-Identifier: Apache-2.0
"""Run the Python examples as a user runs them."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import megarl
from examples import sft
from megarl.bench.character_tokenizer import make_tokenizer
from megarl.errors import ConfigError, WorkerError
from tests.helpers.models import make_model

ROOT = Path(__file__).parents[2]
STEPS = 3
# In the environment of a run's processes.
MARK = "MEGARL_TEST_EXAMPLE"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(
        tmp_path_factory.mktemp("examples") / "model", "qwen3", tied=True, vocab_size=100, eos_token_id=0, head_dim=32
    )
    assert make_tokenizer(folder) == 100
    return folder


def marked(out: Path) -> list[str]:
    """Names of the processes that a run, told to write to ``out``, has left."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(out):
                left.append(process.name())
    return left


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: command[2]}
    return subprocess.run([*launcher, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def nll(model: torch.nn.Module, samples: list) -> float:
    """Return the mean over all response tokens, computed sequence by sequence."""
    results = []
    for sample in samples:
        logits = model(torch.as_tensor(sample.tokens)[None]).logits[0, :-1].double()
        logprobs = logits.log_softmax(-1).gather(1, torch.as_tensor(sample.tokens)[1:, None])[:, 0]
        results.append(-logprobs.detach().numpy()[sample.response_mask[1:]])
    return float(np.concatenate(results).mean())


def test_supervised_fine_tuning_at_two_ranks_is_hugging_faces(model):
    out = model.parent / "adapter"
    run = torchrun("examples/sft.py", str(model), str(out), "--tensor", "2", "--steps", str(STEPS))
    assert run.returncode == 0, run.stderr
    losses = [float(value) for value in re.findall(r"nll ([\d.]+)", run.stdout)]
    assert len(losses) == STEPS
    tokenizer = AutoTokenizer.from_pretrained(model)
    batches = sft.batches(tokenizer)
    first = next(batches)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert losses[0] == pytest.approx(nll(base, first), abs=0.02)  # bfloat16
    trained = PeftModel.from_pretrained(base, out)
    assert nll(trained, first) < losses[0] - 0.2


def test_the_loop_without_ray_samples_what_it_trains(model):
    """TP2 trainer and one real engine; the mismatch says that each version's completions came from its weights."""
    out = model.parent / "policy"
    run = torchrun("examples/loop.py", str(model), str(out), "--tensor", "2", "--steps", "3", "--dtype", "float32")
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"step (\d) .*mismatch (\S+)  gradient norm \S+  version (\d)", run.stdout)
    assert [(step, version) for step, _, version in rows] == [("1", "1"), ("2", "2"), ("3", "3")]
    assert all(float(mismatch) < 1e-5 for _, mismatch, _ in rows)
    assert (out / "adapter_model.safetensors").is_file()
    assert marked(out) == [], "a process outlived the run"


def test_a_dead_sampler_process_is_an_error_at_once(model):
    with megarl.SamplerProcess(model, log=model.parent / "engine.log") as engine:
        engine.process.kill()
        with pytest.raises(WorkerError, match=r"process of sampler 0 ended with status -9; its log: .*engine.log"):
            engine.generate([np.array([1])], 0)
        with pytest.raises(WorkerError, match="sampler 0 ended"):
            engine.receive(b"{}", 0).result()


def test_a_sampler_process_refuses_a_wrong_setting_before_it_starts(model):
    with pytest.raises(ConfigError, match=r"sampler: .*'temprature'.*temperature"):
        megarl.SamplerProcess(model, sampler={"temprature": 1.0})
