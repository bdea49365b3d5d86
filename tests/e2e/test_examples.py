# SPDX-License-Identifier: Apache-2.0
"""Run the Python examples as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import sft
from tests.helpers.models import make_model
from tests.helpers.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(
        tmp_path_factory.mktemp("examples") / "model", "qwen3", tied=True, vocab_size=100, eos_token_id=0
    )
    assert make_tokenizer(folder) == 100
    return folder


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launcher, "examples/sft.py", str(model), str(out), "--tensor", "2", "--steps", str(STEPS)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
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
