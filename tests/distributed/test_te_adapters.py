"""Adapters behind a fused norm equal Hugging Face + PEFT: Transformer Engine's interface, by a stand-in on a CPU."""

import pytest

from tests.distributed import test_parity
from tests.helpers.ranks import run_ranks

MODELS = ("qwen3", "qwen2-tied", "llama")


def train_standin_ranks(folder: str, layouts: list[str]) -> dict:
    """On each rank: every model at every layout, built of stand-ins."""
    from megarl.model import build
    from tests.helpers.te_standin import NormColumnStandIn, standin_block_spec

    build.block_spec = lambda model: standin_block_spec
    test_parity.MODELS = {name: test_parity.MODELS[name] for name in MODELS}
    used = []
    forward = NormColumnStandIn.forward
    NormColumnStandIn.forward = lambda self, hidden: used.append(self) or forward(self, hidden)
    results = test_parity.train_ranks(folder, layouts)
    assert used
    return results


@pytest.mark.parametrize("layouts", [["TP1"], ["TP2+SP", "TP2"]], ids=str)
def test_adapters_behind_a_fused_norm_equal_peft(tmp_path, monkeypatch, layouts):
    monkeypatch.setattr(test_parity, "MODELS", {name: test_parity.MODELS[name] for name in MODELS})
    folder, expected = test_parity.make_truths(tmp_path)
    rows = []
    for results in run_ranks(train_standin_ranks, {"TP1": 1}.get(layouts[0], 2), str(folder), layouts):
        for key, result in results.items():
            name = key.split("/")[1]
            rows += [
                (f"{key} {what}", error, bound) for what, error, bound in test_parity.compare(result, expected[name])
            ]
            test_parity.compare_base_weights(folder / name / "model", result["weights"])
            test_parity.compare_merged(result)
    assert len(rows) > 100
    assert not [row for row in rows if not row[1] <= row[2]]
