# SPDX-License-Identifier: Apache-2.0
"""Check which architectures of model.backend=transformers the sampler takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RunConfig, parse_config
from megarl.errors import UnsupportedError
from megarl.sampler.engine import settings


def run(folder: Path, backend: str, **shape: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(shape))
    return parse_config({"model": {"path": str(folder), "backend": backend}, "task": {"name": "arithmetic"}})


@pytest.mark.parametrize("model_type", ["gemma3_text", "glm4", "one_that_nobody_tested"])
def test_vllm_decides_on_a_family_that_is_not_listed(tmp_path: Path, model_type: str) -> None:
    settings.check_sampled(run(tmp_path, "transformers", model_type=model_type, sliding_window=8))
    with pytest.raises(UnsupportedError, match=f"'{model_type}'; supported are llama, .* model.backend=transformers"):
        settings.check_sampled(run(tmp_path, "local", model_type=model_type))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"model_type": "cohere2", "sliding_window": 8}, "sliding_window is 8"),
        ({"model_type": "gpt_oss"}, "must read the base from its files: use content=adapter and base_weights=disk"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'; supported are"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ],
)
def test_what_vllm_is_known_to_compute_differently_is_refused(tmp_path: Path, shape: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        settings.check_sampled(run(tmp_path, "transformers", **shape))


def test_a_window_that_no_sequence_exceeds_is_taken(tmp_path: Path) -> None:
    settings.check_sampled(run(tmp_path, "transformers", model_type="cohere2", sliding_window=100_000))


def test_adapters_of_attention_alone_are_taken_where_vllm_holds_experts_otherwise(tmp_path: Path) -> None:
    given = run(tmp_path, "transformers", model_type="gpt_oss", num_attention_heads=4)
    given = given.model_copy(
        update={"checkpoint_engine": given.checkpoint_engine.model_copy(update={"base_weights": "disk"})}
    )
    settings.check_sampled(given)
    arguments = settings.engine_arguments(given, 0, "cpu")
    assert arguments["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    with_experts = given.lora.model_copy(update={"target_parameters": ["mlp.experts.down_proj"]})
    with pytest.raises(UnsupportedError, match="takes adapters of q_proj, k_proj, v_proj, o_proj only, so leave it"):
        settings.check_sampled(given.model_copy(update={"lora": with_experts}))
