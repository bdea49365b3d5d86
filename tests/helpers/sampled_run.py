# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model of an architecture that only transformers has with `megarl train`, against real vLLM."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.bench.character_tokenizer import make_tokenizer
from tests.helpers.architectures import write_model
from tests.helpers.train_run import RECIPE, REWARD, TrainRun, read_rows

# The tokenizer's size, and heads that vLLM's attention on CPU accepts.
SIZES = {"vocab_size": 100, "eos_token_id": 0, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
STEPS = 4


@dataclass(frozen=True)
class Sampled:
    """Settings of one architecture besides ``SIZES``.

    Attributes:
        model: settings of config.json.
        run: settings of the run.
        refused: part of the error by which the run is refused; None if it runs.
        merged: False if merged weights cannot be sent.
    """

    model: dict[str, Any] = field(default_factory=dict)
    run: tuple[str, ...] = ()
    refused: str | None = None
    merged: bool = True


CASES = {
    "cohere2": Sampled(refused="sliding_window is 8 in its config.json"),
    "cohere2 (wide)": Sampled({"sliding_window": 128}),
    "gemma2": Sampled(),
    # Without the cap, tied embeddings of this width would only ever repeat the last token.
    "gemma3_text": Sampled({"final_logit_softcapping": 3.0}),
    "glm4": Sampled(),
    "gpt_oss": Sampled(run=("checkpoint_engine.base_weights=disk",), merged=False),
    "granite": Sampled(),
    "olmo2": Sampled(),
    # vLLM makes the bias of its output layer only while it reads files.
    "phi": Sampled(run=("checkpoint_engine.base_weights=disk",)),
    "phi3": Sampled(),
    # transformers stacks the experts of a layer, so that only the adapter has names that vLLM knows.
    "qwen3_moe": Sampled(
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ("checkpoint_engine.base_weights=disk", "lora.target_parameters=[gate_up_proj,down_proj]"),
        merged=False,
    ),
    "smollm3": Sampled(),
    "starcoder2": Sampled(),
}


def write_recipe(folder: Path, name: str) -> Path:
    """Write a model of a case, its reward and a recipe for it."""
    model = write_model(folder / "model", name.split()[0], **(SIZES | CASES[name].model))
    assert make_tokenizer(model) == SIZES["vocab_size"]
    (folder / "reward.py").write_text(REWARD)
    recipe = folder / "recipe.yaml"
    text = RECIPE.replace("MODEL", str(model)).replace("data: 2", "data: 1")
    recipe.write_text(text.replace("dtype: float32", "dtype: float32, backend: transformers"))
    return recipe


def train(folder: Path, name: str, *settings: str) -> tuple[Path | None, str]:
    """Run all steps of a case; return the run folder, None if the run was refused, and the output."""
    recipe = write_recipe(folder, name)
    run = TrainRun(recipe, f"train.output={folder}", *CASES[name].run, *settings)
    try:
        if CASES[name].refused:
            run.process.wait(60)
            return None, run.output()
        run.wait_for(f"step {STEPS} ", timeout=300)
        assert run.finish(60) == 0, run.output()[-3000:]
        return run.folder(), run.output()
    finally:
        run.kill()


def mismatch(run: Path) -> float:
    """Return the largest |sampler - trainer| logprob difference of any token."""
    rows = [row for row in read_rows(run) if "mismatch_max" in row]
    assert len(rows) == STEPS
    return max(row["mismatch_max"] for row in rows)
