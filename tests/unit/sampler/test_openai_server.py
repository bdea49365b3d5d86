# SPDX-License-Identifier: Apache-2.0
"""Check that vLLM's own parser reads the options of `megarl serve` as they are in the recipe."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config import CheckpointEngineConfig, EngineConfig, LoraConfig, ModelConfig, SamplerConfig
from megarl.sampler.openai_server import server_arguments
from tests.helpers.models import make_model

GIVEN: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": 128, "rope_scaling": {"factor": 2.0}},
    "cudagraph_capture_sizes": [1, 2, 4],
    "ignore_patterns": ["original/*", "a b"],
    "quantization": None,
    "disable_cascade_attn": True,
    "async_scheduling": False,
    "max_logprobs": 30,
}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder: Path = make_model(tmp_path_factory.mktemp("server") / "model", "qwen3", tied=True)
    config = EngineConfig(
        model=ModelConfig(path=str(folder)),
        lora=LoraConfig(),
        sampler=SamplerConfig(engine_args=GIVEN),
        checkpoint_engine=CheckpointEngineConfig(),
    )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(server_arguments(config, "cpu", "mine"))


@pytest.mark.parametrize("name", GIVEN)
def test_the_server_gets_every_value_of_engine_args(parsed: Any, name: str) -> None:
    assert getattr(parsed, name) == GIVEN[name]
