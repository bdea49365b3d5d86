# SPDX-License-Identifier: Apache-2.0
"""Run `megarl train` twice on one GPU with the same seeds: everything but times must be the same, bit by bit.

`python3 -m tests.gpu.train_twice FOLDER [key=value ...]`: a small random model with `numerics: bitwise` and CUDA
graphs, trainer and engine on the same GPU, an evaluation between. `model.numerics=fast` shows what the mode is for.
"""

import os
import sys
from pathlib import Path
from typing import Any

from megarl.bench.character_tokenizer import make_tokenizer
from tests.e2e.same_runs import check_same
from tests.helpers.models import make_model
from tests.helpers.train_run import TrainRun, make_recipe, read_rows

STEPS, SECONDS = 4, 250
SETTINGS = [
    "train.device=cuda", "sampler.share_gpus=true", "sampler.kv_cache_gib=4", f"train.steps={STEPS}",
    "parallel.data=1", "model.dtype=bfloat16", "model.backend=local", "model.numerics=bitwise",
    "train.cuda_graphs=true", "sampler.reproducible=true", "lora.r=16",
]  # fmt: skip


def main(folder: Path, *overrides: str) -> None:
    """Run both, one after the other, and compare them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the helper hides GPUs from tests otherwise
    recipe = make_recipe(folder, "qwen3", tied=True)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "vocab_size": 256,  # vLLM 0.26 cannot start LoRA with fewer
        "eos_token_id": 0,
    }
    model = make_model(folder / "wide", "qwen3", tied=True, dtype="bfloat16", **sizes)
    make_tokenizer(model)
    folders = []
    for name in ("first", "second"):
        run = TrainRun(recipe, f"model.path={model}", f"train.output={folder / name}", *SETTINGS, *overrides)
        try:
            status = run.finish(SECONDS)
        finally:
            run.look()
            run.kill()
            print(run.output()[-2500:], flush=True)
        assert status == 0, f"{name}: status {status}"
        folders.append(run.folder())
    print("mismatch_max", [row.get("mismatch_max") for row in read_rows(folders[0])])
    first, second = folders
    check_same(first, second, steps=STEPS)
    print(f"{STEPS} steps, their rollouts, evaluations and adapters are the same, bit by bit")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
