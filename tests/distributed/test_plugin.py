"""LoRA works on a GPTModel that megarl did not build, and PEFT computes the same from what it saved."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from megarl.verify.reference import load_reference
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "plugin" / "train.py"
STEPS = 4


def run_example(model: str, adapter: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("plugin_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main(model, adapter, STEPS)


def reference_loss(model: Path, adapter: Path | None) -> float:
    """Loss of the example's batch under Hugging Face, with a saved adapter under PEFT."""
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        logits = load_reference(model, adapter)(input_ids=tokens).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_mcore_loop_trains_an_adapter_that_peft_reproduces(tmp_path, world_size):
    model = make_model(tmp_path / "model", "llama", tied=True, vocab_size=132)
    losses, *others = run_ranks(run_example, world_size, str(model), str(tmp_path / "adapter"))
    assert all(other == losses for other in others)
    assert losses == sorted(losses, reverse=True), losses
    assert reference_loss(model, None) == pytest.approx(losses[0], abs=1e-5)
    assert reference_loss(model, tmp_path / "adapter") == pytest.approx(losses[-1], abs=1e-5)
    assert losses[0] - losses[-1] > 1e-2
