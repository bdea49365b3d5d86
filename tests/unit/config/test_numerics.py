# SPDX-License-Identifier: Apache-2.0
"""Check the switch `model.numerics`: what it refuses, and what it sets for vLLM."""

import os

import pytest

from megarl.config import EngineConfig, LoraConfig, ModelConfig, ParallelConfig, SamplerConfig
from megarl.config.load import parse_section
from megarl.config.numerics import check_engine_numerics, check_trainer_numerics, summary
from megarl.config.sections.checkpoint_engine import CheckpointEngineConfig
from megarl.config.sections.train import TrainConfig
from megarl.config.trainer import TrainerConfig
from megarl.errors import ConfigError, UnsupportedError
from megarl.sampler.engine.arguments import PAGE, bitwise_arguments
from megarl.sampler.engine.settings import engine_arguments
from megarl.sampler.environment import BITWISE, prepare_numerics

SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128,
}  # fmt: skip
MODEL = ModelConfig(path="/nowhere", numerics="bitwise")


def test_a_plain_model_is_accepted() -> None:
    check_trainer_numerics(TrainerConfig(MODEL, parallel=ParallelConfig(data=2)), SHAPE)
    check_engine_numerics(EngineConfig(MODEL), SHAPE | {"rope_parameters": {"rope_type": "llama3"}})


def test_a_trainer_may_have_several_engines() -> None:
    """Each engine holds the whole model, so the number of engines changes no bit; neither does the temperature."""
    sampler = SamplerConfig(engines=2, temperature=0.7)
    check_engine_numerics(EngineConfig(MODEL, sampler=sampler), SHAPE)
    check_trainer_numerics(TrainerConfig(MODEL, temperature=0.7), SHAPE)


def test_chunks_of_prompts_are_not_refused() -> None:
    """tests/gpu/bitwise_model.py asks vLLM for them."""
    sampler = SamplerConfig(engine_args={"long_prefill_token_threshold": 96})
    arguments = engine_arguments(EngineConfig(MODEL, sampler=sampler), 0, "cuda")
    assert arguments["long_prefill_token_threshold"] == 96 and arguments["attention_backend"] == "TRITON_ATTN"
    assert arguments["block_size"] == PAGE


@pytest.mark.parametrize("setting", ["attention_backend", "block_size", "compilation_config"])
def test_what_bitwise_sets_cannot_be_overridden(setting: str) -> None:
    sampler = SamplerConfig(engine_args={setting: "another"})
    with pytest.raises(ConfigError, match=rf"sampler\.engine_args\.{setting}"):
        engine_arguments(EngineConfig(MODEL, sampler=sampler), 0, "cuda")


def test_megatron_cores_own_mode_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="batch_invariant_mode"):
        parse_section(ModelConfig, "model", {"path": "/nowhere", "batch_invariant_mode": True})


def test_tensor_parallelism_is_refused_on_either_side_with_what_is_supported() -> None:
    trainer = TrainerConfig(MODEL, parallel=ParallelConfig(tensor=2, data=2))
    supported = r"parallel\.tensor = 2; supported is 1 \(parallel\.data may be more\)"
    with pytest.raises(UnsupportedError, match=rf"'bitwise' with {supported}; or use model\.numerics=fast"):
        check_trainer_numerics(trainer, SHAPE)
    engine = EngineConfig(MODEL, sampler=SamplerConfig(engines=2, parallel={"tensor": 2}))
    supported = r"sampler\.parallel\.tensor = 2; supported is 1 \(sampler\.engines may be more\)"
    with pytest.raises(UnsupportedError, match=rf"'bitwise' with {supported}; or use model\.numerics=fast"):
        check_engine_numerics(engine, SHAPE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": MODEL.model_copy(update={"dtype": "float32"})}, "model.dtype = 'float32'"),
        ({"model": MODEL.model_copy(update={"backend": "te"})}, "model.backend = 'te'"),
        ({"parallel": ParallelConfig(tensor=2)}, "parallel.tensor = 2"),
        ({"parallel": ParallelConfig(context=2)}, "parallel.context = 2"),
        ({"lora": LoraConfig(lora_dropout=0.1)}, "lora.lora_dropout = 0.1"),
        ({"train": TrainConfig(steps=1, device="cpu")}, "train.device = 'cpu'"),
    ],
)
def test_the_trainer_refuses_by_name(change: dict, named: str) -> None:
    config = TrainerConfig(**({"model": MODEL} | change))
    with pytest.raises(UnsupportedError, match=named):
        check_trainer_numerics(config, SHAPE)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"model_type": "qwen3_moe"}, "model_type of config.json = 'qwen3_moe'"),
        ({"attention_bias": True}, "attention_bias of config.json = True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type of config.json = 'yarn'"),
        ({"head_dim": 80}, "head_dim of config.json = 80"),
        ({"hidden_size": 1000}, "hidden_size of config.json = 1000"),
    ],
)
def test_models_are_refused_by_name(shape: dict, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_engine_numerics(EngineConfig(MODEL), SHAPE | shape)


def test_the_engine_refuses_by_name() -> None:
    parallel = SamplerConfig(parallel={"tensor": 2})
    with pytest.raises(UnsupportedError, match=r"sampler\.parallel\.tensor = 2"):
        check_engine_numerics(EngineConfig(MODEL, sampler=parallel), SHAPE)
    merged = CheckpointEngineConfig(content="merged")
    with pytest.raises(UnsupportedError, match=r"checkpoint_engine\.content = 'merged'"):
        check_engine_numerics(EngineConfig(MODEL, checkpoint_engine=merged), SHAPE)


def test_fast_changes_nothing() -> None:
    fast = ModelConfig(path="/nowhere", dtype="float32")
    check_trainer_numerics(TrainerConfig(fast, parallel=ParallelConfig(tensor=2)), SHAPE)
    assert bitwise_arguments({"enforce_eager": False}, "fast") == {"enforce_eager": False}


def test_vllm_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BITWISE:
        monkeypatch.delenv(name, raising=False)
    given = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    arguments = bitwise_arguments(given, "bitwise")
    assert arguments["attention_backend"] == "TRITON_ATTN"
    assert arguments["compilation_config"]["cudagraph_capture_sizes"] == [1, 2]
    assert arguments["compilation_config"]["mode"] == 0
    prepare_numerics("bitwise")
    assert {name: os.environ[name] for name in BITWISE} == BITWISE
    prepare_numerics("fast")
    assert not BITWISE.keys() & os.environ.keys()
    # The user's own variables are left alone where the run is fast.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    prepare_numerics("fast")
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert "attention_backend=TRITON_ATTN" in summary()
