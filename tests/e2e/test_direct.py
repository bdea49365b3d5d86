# SPDX-License-Identifier: Apache-2.0
"""Weights written straight into an engine's parameters (``sampler_direct``), or shared with it (``sampler_shared``)."""

from collections.abc import Iterator

import pytest

from tests.e2e.sampler_processes import TIMEOUT, Scenarios

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    started = Scenarios(tmp_path_factory.mktemp("direct"), ("direct", "shared"))
    yield started
    started.close()


@pytest.mark.parametrize("content", ["merged", "adapter"])
def test_weights_written_straight_into_parameters_give_pefts_logprobs(scenarios: Scenarios, content: str) -> None:
    """As on GPUs, where vLLM's kernels read parameters in the checkpoint's layout."""
    direct = scenarios["direct"][content]
    assert max(direct["errors"]) < 1e-4 and direct["again"] < 1e-4
    assert min(direct["errors_of_previous"]) > 1e-1
    norm, embedding = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
    for name, cause in {
        "missing": f"parameters that no tensor reached: '{norm}'",
        "unknown": f"'{norm.replace('layers.1', 'layers.7')}' came twice or is no parameter of the model",
        "wrong_shape": f"vLLM refused tensor '{embedding}' of shape (",
        "nan": f"the set of base weights holds a value that is not finite in '{embedding}'",
    }.items():
        sync, refused = direct["faults"][name]
        assert cause in sync and refused.startswith("WeightSyncError: the sampler refuses to generate")


def test_experts_are_written_straight_into_parameters(scenarios: Scenarios) -> None:
    mixture = scenarios["direct"]["mixture"]
    assert mixture["error"] < 1e-4 and mixture["error_of_new_base"] < 1e-4
    assert mixture["error_of_old_base"] > 1e-1
    for name, cause in {
        "base_missing_expert": "parameters that no tensor reached: 'model.layers.1.mlp.experts.3.up_proj.weight'",
        "base_extra_expert": "'model.layers.1.mlp.experts.4.up_proj.weight' came twice or is no parameter",
        "base_wrong_shape": "the model needs",
    }.items():
        assert cause in mixture["faults"][name]


@pytest.mark.parametrize(
    ("name", "workers", "copied"),
    [("qwen3", 1, ["qkv_proj"]), ("qwen3_moe", 1, ["qkv_proj"]), ("two ranks", 2, [])],
)
def test_an_engine_that_reads_the_trainers_base_gives_pefts_logprobs_and_writes_none_of_it(
    scenarios: Scenarios, name: str, workers: int, copied: list[str]
) -> None:
    """With two ranks each worker reads the parts of the rank on its GPU; a rank with one KV head holds q, k, v so."""
    shared = scenarios["shared"][name]
    assert len(shared["borrowed"]) == workers
    for borrowed, total, own in shared["borrowed"]:
        assert own == copied and 0.7 * total < borrowed < total
    assert max(shared["errors"]) < 1e-4
    assert "do not hold the set of base weights exactly in 'model.layers." in shared["faults"]["other"]
    assert "holds a value that is not finite in 'model.layers." in shared["faults"]["nan"]
    assert shared["unchanged"]
    # The trainer's memory was changed without a sync.
    assert shared["error_of_new_base"] < 1e-4 and shared["error_of_old_base"] > 1e-1
