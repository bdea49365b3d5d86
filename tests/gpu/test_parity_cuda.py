"""Promise 1 on CUDA, over NCCL on several GPUs: fp32 to the bounds of the CPU, bf16 no worse than Hugging Face."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_parity import LAYOUTS, compare, make_config, make_truths, parallel_of, train_ranks
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_reference, logprobs_of, make_adapter, make_samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    return make_truths(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize(
    "layouts",
    [
        ["TP1"],
        ["TE"],
        ["TE+TP2+SP", "TE+PP2"],
        ["TP2+SP", "TP2", "PP2", "DP2", "CP2"],
        ["TP2xPP2", "PP2xDP2", "TP2+SPxCP2", "PP2xCP2", "CP2xDP2"],
    ],
    ids=str,
)
def test_fp32_equals_peft(truths, layouts, monkeypatch):
    folder, expected = truths
    world = parallel_of(LAYOUTS[layouts[0]]).world_size
    if "backend" in LAYOUTS[layouts[0]]:
        pytest.importorskip("transformer_engine")
        # Read when CUDA starts in the ranks: without it Transformer Engine multiplies in TF32.
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    rows = []
    for results in run_ranks(train_ranks, world, str(folder), layouts):
        for key, result in results.items():
            rows += [(f"{key} {what}", e, b) for what, e, b in compare(result, expected[key.split("/")[1]])]
    worst = max(rows, key=lambda row: row[1] / row[2])
    print(f"\n{layouts}: {len(rows)} comparisons, worst {worst[0]}: {worst[1]:.1e} of {worst[2]:.0e}")
    assert not [row for row in rows if not row[1] <= row[2]]


def logprobs_bf16(folder: str, layout: dict[str, Any]) -> list[np.ndarray]:
    from megarl.config import parse_config
    from megarl.lora import apply_lora, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    tree = make_config(f"{folder}/model", layout).model_dump()
    tree["model"]["dtype"] = "bfloat16"
    config = parse_config(tree)
    groups = init_groups(config.parallel, pick_device("auto"))
    peft_config = load_peft_config(f"{folder}/adapter")
    model = MegatronModel(config, groups, lambda c, hf, g: apply_lora(c, peft_config, hf, groups=g))
    model.load_adapter(f"{folder}/adapter")
    return model.forward(model.pack(make_samples(40, SHAPE["vocab_size"])))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"backend": "te"}),
        ("qwen3", {"backend": "te"}),
        ("qwen3_moe", {}),
        ("qwen3", {"context": 2}),
    ],
    ids=str,
)
def test_bf16_is_no_further_from_fp32_than_hugging_face(tmp_path, family, layout):
    world = parallel_of(layout).world_size
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if "backend" in layout:
        pytest.importorskip("transformer_engine")
    model = make_model(tmp_path / "model", family, tied=False, dtype="bfloat16", hidden_size=256, head_dim=64)
    adapter = make_adapter(model, tmp_path / "adapter")
    samples = make_samples(40, SHAPE["vocab_size"])
    ours = run_ranks(logprobs_bf16, world, str(tmp_path), layout)[0]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        reference = load_reference(model, adapter, dtype).cuda()
        with torch.no_grad():
            found[dtype] = np.concatenate([logprobs_of(reference, sample).cpu().numpy() for sample in samples])
    truth = found[torch.float32]
    theirs = np.abs(found[torch.bfloat16] - truth)
    errors = np.abs(np.concatenate(ours) - truth)
    print(f"\n{family} {layout}: mean |error| ours {errors.mean():.2e}, Hugging Face bf16 {theirs.mean():.2e}")
    assert 0 < errors.mean() <= 1.1 * theirs.mean()
