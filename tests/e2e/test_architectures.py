# SPDX-License-Identifier: Apache-2.0
"""Train with model.backend=transformers against real vLLM; `python -m tests.sampled` runs every tested architecture."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.cli.main import main
from tests.helpers.models import make_model
from tests.helpers.sampled import check_sampled, peft_logprobs
from tests.helpers.sampled_run import STEPS, train
from tests.helpers.train_run import REWARD, ROOT, TrainRun, read_rollout, read_rows

# The recipe's values are for a GPU. The reward differs between completions of a random model.
SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.learning_rate=0.01",
    "train.micro_batch_tokens=2048",
    "model.dtype=float32",
    "sampler.samples_per_prompt=4",
    "sampler.max_prompt_tokens=512",
    "sampler.max_response_tokens=16",
    "sampler.kv_cache_gib=0.2",
    "sampler.max_num_seqs=8",
    "task.options.size=50",
    "task.reward=reward.py:reward",
]


@pytest.mark.long
def test_glm_trains_with_transformers_and_samples_the_same_logprobs(tmp_path):
    """Its files fuse gate and up, and a part of each head is rotated."""
    run, output = train(tmp_path, "glm4")
    assert run is not None, output
    check_sampled(run, tmp_path / "recipe.yaml")
    assert main(["export", str(run), "--format", "merged", "--out", str(tmp_path / "merged" / "model")]) == 0
    rows = read_rollout(run, STEPS)
    expected = peft_logprobs(tmp_path / "recipe.yaml", run / "adapter", rows)
    assert np.abs(peft_logprobs(tmp_path / "merged" / "recipe.yaml", None, rows) - expected).max() <= 1e-4


def countdown(folder: Path, model: Path, backend: str) -> Path:
    """Run the example with a back end; return the run folder."""
    folder.mkdir()
    recipe = Path(shutil.copy(ROOT / "examples" / "countdown" / "run.yaml", folder))
    (folder / "reward.py").write_text(REWARD)
    run = TrainRun(recipe, f"train.output={folder}", f"model.path={model}", f"model.backend={backend}", *SMALL)
    try:
        run.wait_for("step 2 ", timeout=240)
        assert run.finish(60) == 0, run.output()
        return run.folder()
    finally:
        run.kill()


@pytest.mark.long
def test_countdown_is_the_same_run_with_either_back_end(tmp_path):
    sizes = {"vocab_size": 100, "head_dim": 32, "eos_token_id": 0, "max_position_embeddings": 1024}
    model = make_model(tmp_path / "model", "qwen3", tied=True, **sizes)
    assert make_tokenizer(model) == 100
    runs = [countdown(tmp_path / backend, model, backend) for backend in ("local", "transformers")]
    for ours, other in zip(*(read_rows(run) for run in runs), strict=True):
        for name in ("reward", "entropy", "grad_norm", "loss"):
            assert ours.get(name) == pytest.approx(other.get(name), rel=1e-4, abs=1e-7), (name, ours, other)
    assert any(row.get("grad_norm") for row in read_rows(runs[0]))
    first, second = ([row["response_ids"] for row in read_rollout(run, 2)] for run in runs)
    assert first == second
