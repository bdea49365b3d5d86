# SPDX-License-Identifier: Apache-2.0
"""Put adapters behind a fused norm (Transformer Engine's interface, by a stand-in on a CPU) and compare with PEFT."""

import pytest

from megarl.verify.reference.reference_runs import make_truth, run_shared
from megarl.verify.run import verify_places
from tests.distributed.test_parity import LAYOUTS, MODELS
from tests.helpers.cases import FLOAT32_ROWS, check, make_case, place


def build_of_standins():
    """In each rank, make a norm and the linear behind it one module."""
    from megarl.model.layers import build
    from tests.helpers.te_standin import NormColumnStandIn, standin_block_spec

    def run_fused(model, *args, **kwargs):
        assert any(isinstance(module, NormColumnStandIn) for module in model.modules())
        return forward(model, *args, **kwargs)

    forward = build.PackedGPTModel.forward
    build.PackedGPTModel.forward = run_fused
    build.block_spec = lambda model: standin_block_spec


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standin")
    cases = [make_case(folder, name, **MODELS[name]) for name in ("qwen3", "qwen2-tied", "qwen3-moe")]
    run_shared(make_truth, cases)
    return cases


def test_adapters_behind_a_fused_norm_equal_peft(cases):
    places = [
        place(case, name, LAYOUTS[name])
        for name in ("TP2+SP", "TP2", "PP2", "CP2")
        for case in cases
        if not (name == "TP2" and case.name == "qwen3-moe")  # needs SP
    ]
    reports = verify_places(places, prepare=build_of_standins)
    assert all([row.name for row in report.rows] == FLOAT32_ROWS for report in reports)
    check(reports)
