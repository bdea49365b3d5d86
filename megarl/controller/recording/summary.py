# SPDX-License-Identifier: Apache-2.0
"""Compute a run's headline numbers from the metrics of its steps."""

from typing import Any

import numpy as np

# Number of steps that reward_first and reward_last average over.
ENDS = 3


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the run's headline numbers over all its steps."""
    if not rows:
        return {"steps": 0}

    def series(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows if name in row], dtype=float)

    mismatch = {}
    if series("mismatch_mean").size:  # no step has it if every completion was masked (loss.truncated)
        mismatch["mismatch_mean"] = float(series("mismatch_mean").mean())
        mismatch["mismatch_max"] = float(series("mismatch_max").max())
    return {
        "steps": len(rows),
        "reward_first": float(series("reward")[:ENDS].mean()),
        "reward_last": float(series("reward")[-ENDS:].mean()),
        "reward_max": float(series("reward").max()),
        "groups_without_signal": float(series("groups_without_signal").mean()),
        **mismatch,
        "train_tokens_per_second": float(series("trained_tokens").sum() / series("seconds/train").sum()),
        "sample_tokens_per_second": float(
            series("sampled_tokens").sum() / (series("sampled_tokens") / series("sample_tokens_per_second")).sum()
        ),
        "sync_seconds": float(np.median(series("seconds/sync"))),
        **coverage(rows),
    }


def coverage(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return ``grad_tensors`` and ``adapter_tensors`` of the last step with a gradient; nothing if no step had one."""
    for row in reversed(rows):
        if row.get("grad_norm") and not row.get("skipped_backward"):
            return {name: row[name] for name in ("grad_tensors", "adapter_tensors") if name in row}
    return {}
