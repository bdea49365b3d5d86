# SPDX-License-Identifier: Apache-2.0
"""Compare the completions that a run recorded with Hugging Face + PEFT."""

from pathlib import Path

import numpy as np
import torch

from megarl.types import Sample
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from tests.helpers.train_run import read_rollout, read_rows


def peft_logprobs(recipe: Path, adapter: Path | None, rows: list[dict], *, merge: bool = False) -> np.ndarray:
    """Return Hugging Face + PEFT's logprobs of recorded completions, one after the other; with PEFT's own merge."""
    model = load_reference(recipe.parent / "model", adapter)
    model = model.merge_and_unload() if merge else model
    logprobs = []
    for row in rows:
        tokens = np.array(row["prompt_ids"] + row["response_ids"])
        mask: np.ndarray = np.zeros(len(tokens), dtype=bool)
        for begin, end in row.get("drawn", [[0, len(row["response_ids"])]]):
            mask[len(row["prompt_ids"]) + begin : len(row["prompt_ids"]) + end] = True
        with torch.no_grad():
            logprobs.append(logprobs_of(model, Sample(tokens, mask)).numpy())
    return np.concatenate(logprobs)


def check_sampled(folder: Path, recipe: Path, *, merge: bool = False) -> None:
    """Check the completions of a run's first steps: the sampler computed what the trainer did, and what PEFT does."""
    for row in read_rows(folder):
        assert row["mismatch_max"] <= 1e-4, row
    for step in (1, 2):
        rows, adapter = read_rollout(folder, step + 1), folder / "checkpoints" / f"step-{step:06d}" / "adapter"
        sampled = np.concatenate([row["logprobs"] for row in rows])
        assert np.abs(peft_logprobs(recipe, adapter, rows, merge=merge) - sampled).max() <= 1e-4
        assert np.abs(peft_logprobs(recipe, None, rows) - sampled).max() > 1e-3
