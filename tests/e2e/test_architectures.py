# SPDX-License-Identifier: Apache-2.0
"""Train a model that Megatron's families here lack against real vLLM; `python -m tests.sampled` runs all of them."""

import numpy as np

from megarl.cli.main import main
from tests.helpers.sampled import check_sampled, peft_logprobs
from tests.helpers.sampled_run import STEPS, train
from tests.helpers.train_run import read_rollout


def test_glm_trains_with_transformers_and_samples_the_same_logprobs(tmp_path):
    """Its files fuse gate and up, and a part of each head is rotated."""
    run, output = train(tmp_path, "glm4")
    assert run is not None, output
    check_sampled(run, tmp_path / "recipe.yaml")
    assert main(["export", str(run), "--format", "merged", "--out", str(tmp_path / "merged" / "model")]) == 0
    rows = read_rollout(run, STEPS)
    expected = peft_logprobs(tmp_path / "recipe.yaml", run / "adapter", rows)
    assert np.abs(peft_logprobs(tmp_path / "merged" / "recipe.yaml", None, rows) - expected).max() <= 1e-4
