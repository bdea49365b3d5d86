# SPDX-License-Identifier: Apache-2.0
"""Run `megarl train` on a GPU that trainer and engine share: plainly, with the engine's sleep, with one base for both.

`python3 -m tests.gpu.train_modes FOLDER [MODE ...] [key=value ...]`: a tiny model in bfloat16, in the named modes
(`plain`, `sleep`, `share_base`) or in all. Sampler and trainer must agree in each. Prints the seconds of each phase.
With two GPUs in CUDA_VISIBLE_DEVICES two ranks share them with an engine of two.
"""

import json
import os
import statistics
import sys
from pathlib import Path

from tests.helpers.train_run import TrainRun, make_recipe, read_rows

SETTINGS = [
    "train.device=cuda", "sampler.share_gpus=true", "sampler.kv_cache_gib=4", "train.steps=4",
    "sampler.enforce_eager=true", "parallel.data=1", "model.dtype=bfloat16",
]  # fmt: skip
MODES = {"plain": "sampler.sleep=false", "sleep": "sampler.sleep=true", "share_base": "sampler.share_base=true"}
# Two tensor parallel ranks, and an engine of two.
WIDE = ["parallel.tensor=2", "sampler.parallel.tensor=2"]
SHOWN = ("reward_mean", "mismatch_mean", "mismatch_max", "canary", "sync_bytes")
# Bound of |sampler - trainer| in bfloat16 with a vocabulary of 100, mean over the tokens of a step.
MISMATCH = 0.02


def main(folder: Path, *words: str) -> None:
    """Run modes one after the other."""
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word] or list(MODES)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the helper hides GPUs from tests otherwise
    wide = WIDE if "," in os.environ["CUDA_VISIBLE_DEVICES"] else []
    recipe = make_recipe(folder, "qwen3", tied=True)
    for name in names:
        run = TrainRun(recipe, f"train.output={folder / name}", MODES[name], *SETTINGS, *wide, *overrides)
        status = run.finish(400)
        print(run.output()[-3000:], flush=True)
        assert status == 0, f"{name}: status {status}"
        rows = [row for row in read_rows(run.folder()) if row["step"]]
        for row in rows:
            print({key: row[key] for key in SHOWN if key in row})
            assert row["mismatch_mean"] < MISMATCH
        phases = sorted(key for key in rows[-1] if key.startswith("seconds/"))
        medians = {phase: round(statistics.median(row.get(phase, 0.0) for row in rows), 3) for phase in phases}
        print(f"{name}: {json.dumps(medians)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
