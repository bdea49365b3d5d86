# SPDX-License-Identifier: Apache-2.0
"""Promise 1 on CUDA, over NCCL on several GPUs: run `megarl verify` in fp32 and in bf16."""

import pytest
import torch

from megarl.verify.run import verify_places
from tests.distributed.test_parity import LAYOUTS, make_cases, places_at
from tests.helpers.cases import make_case, place

# They have between them: norms of queries and keys, biases, tied embeddings, both kinds of mixtures of experts,
# adapters of the embedding and lm_head.
COVERED = ("qwen3", "qwen2", "llama-tied", "qwen3-moe", "mixtral", "llama-vocabulary")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def report_all(places):
    """Verify those that this host has GPUs for, and print the row closest to its bound."""
    sizes = [place.config.parallel.world_size for place in places]
    places = [place for place, size in zip(places, sizes, strict=True) if size <= torch.cuda.device_count()]
    if not places:
        pytest.skip(f"needs {min(sizes)} GPUs")
    if any(place.config.model.backend == "te" for place in places):
        pytest.importorskip("transformer_engine")
    reports = verify_places(places, report=print)
    worst = max(reports, key=lambda report: report.worst.severity)
    print(f"\n{len(reports)} places, {sum(len(report.rows) for report in reports)} comparisons")
    print(f"worst {worst.place.key}: {worst.worst}")
    assert all(report.passed for report in reports), [(r.place.key, r.rows, r.differences) for r in reports]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return make_cases(tmp_path_factory.mktemp("parity"), COVERED)


@pytest.mark.parametrize(
    "layouts",
    [
        ["TE+TP1", "TP1"],  # and so a checkpoint of one back end is resumed on the other
        ["TE+TP2+SP", "TE+PP2", "TE+CP2", "TE+EP2xDP2"],
        ["TE+TP2+SPxCP2", "TE+TP2+SPxEP2xETP2xDP2"],
        ["TP2+SP", "TP2", "PP2", "DP2", "CP2", "EP2xDP2"],
        ["TE+TP2+SP+selective", "TE+PP2+full", "TE+CP2+all", "TE+DP2+all"],
        ["TP2+SP+selective", "PP2+full", "CP2+all", "DP2+overlap"],
        ["TP2xPP2", "PP2xDP2", "TP2+SPxCP2", "PP2xCP2", "CP2xDP2", "TP2+SPxEP2xETP2xDP2"],
    ],
    ids=str,
)
def test_fp32_equals_peft(cases, layouts):
    report_all(places_at(cases, layouts))


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", ["TP1", "TE+TP1"]),
        ("qwen3", ["TP1", "TE+TP1", "CP2", "TE+CP2", "TP2xPP2", "TP2+SPxCP2", "TE+TP2+SPxCP2"]),
        (
            "qwen3_moe",
            ["TP1", "TE+TP1", "EP2xDP2", "TE+EP2xDP2", "TP2+SPxEP2xETP2xDP2", "TE+TP2+SPxEP2xETP2xDP2"],
        ),
    ],
    ids=str,
)
def test_bf16_is_no_further_from_the_truth_than_hugging_face(tmp_path, family, layouts):
    wide = {"tied": False, "hidden_size": 256, "head_dim": 64}
    # Experts are computed together from rank 8 on.
    case = make_case(tmp_path, family, dtype="bfloat16", family=family, adapter={"r": 8, "lora_alpha": 16}, **wide)
    report_all([place(case, layout, LAYOUTS[layout]) for layout in layouts])
