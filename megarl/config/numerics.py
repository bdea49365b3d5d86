# SPDX-License-Identifier: Apache-2.0
"""Refuse settings with which ``model.numerics: bitwise`` would not give equal logprobs, and list what it sets."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from megarl.config.engine import EngineConfig
from megarl.config.trainer import TrainerConfig
from megarl.errors import UnsupportedError

BITWISE: Final = "bitwise"
FAMILIES = ("llama", "qwen2", "qwen3")
ROPES = ("default", "llama3")
MULTIPLE = 16  # elements that a row's length must be a multiple of, for loads of 16 bytes
HEAD_SIZES = (64, 128)

# What the setting sets, by part; printed at the start of a run.
SETS = {
    "trainer": "kernels of megarl.bitwise for linears, LoRA, norms, RoPE, attention, SwiGLU, logits and logprobs; "
    "logits in float32",
    "sampler": "the same kernels in vLLM's place, VLLM_BATCH_INVARIANT=1, second model runner, attention_backend="
    "TRITON_ATTN, block_size=64, no torch.compile, CUDA graphs of whole decoding steps",
}


def summary() -> str:
    """Return what ``bitwise`` sets, a line per part."""
    return "\n".join(["model.numerics=bitwise sets", *(f"  {part}: {what}" for part, what in SETS.items())])


def check_trainer_numerics(config: TrainerConfig, shape: Mapping[str, Any]) -> None:
    """Refuse what the trainer's bitwise layers do not compute.

    Raises:
        UnsupportedError: the message names the setting, its value and what is supported.
    """
    if config.model.numerics == BITWISE:
        _refuse(_of_model(config.model.backend, config.model.dtype, shape))
        _refuse(_of_trainer(config))


def check_built_numerics(config: TrainerConfig, shape: Mapping[str, Any]) -> None:
    """Refuse what the bitwise layers would silently compute otherwise, wherever and in whichever dtype they run.

    Raises:
        UnsupportedError: the message names the setting, its value and what is supported.
    """
    if config.model.numerics == BITWISE:
        _refuse(_of_architecture(config.model.backend, shape))
        _refuse(_of_layers(config))


def check_engine_numerics(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Refuse what the sampler's bitwise operations do not compute.

    Raises:
        UnsupportedError: the message names the setting, its value and what is supported.
    """
    if config.model.numerics == BITWISE:
        _refuse(_of_model(config.model.backend, config.model.dtype, shape))
        _refuse(_of_engine(config))


def _refuse(found: Iterator[tuple[str, Any, str]]) -> None:
    for setting, value, supported in found:
        raise UnsupportedError(
            f"model.numerics is 'bitwise' with {setting} = {value!r}; supported is {supported}; or use "
            "model.numerics=fast"
        )


def _of_model(backend: str, dtype: str, shape: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    yield from _of_architecture(backend, shape)
    if dtype != "bfloat16":
        yield "model.dtype", dtype, "'bfloat16'"
    for name in ("hidden_size", "intermediate_size"):
        if (size := shape.get(name) or 0) % MULTIPLE:
            yield f"{name} of config.json", size, f"a multiple of {MULTIPLE}"
    heads = shape.get("num_attention_heads") or 1
    width = shape.get("head_dim") or (shape.get("hidden_size") or 0) // heads
    if width and width not in HEAD_SIZES:
        yield "head_dim of config.json", width, " or ".join(map(str, HEAD_SIZES))


def _of_architecture(backend: str, shape: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    if backend != "local":
        yield "model.backend", backend, "'local'"
    if (family := shape.get("model_type")) not in FAMILIES:
        yield "model_type of config.json", family, ", ".join(FAMILIES)
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if shape.get(name):
            yield f"{name} of config.json", shape[name], "false"
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        yield "rope_type of config.json", kind, " and ".join(ROPES)


def _of_trainer(config: TrainerConfig) -> Iterator[tuple[str, Any, str]]:
    if config.train.device == "cpu":
        yield "train.device", "cpu", "'cuda' or 'auto'"
    yield from _of_layers(config)


def _of_layers(config: TrainerConfig) -> Iterator[tuple[str, Any, str]]:
    for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"):
        if (size := getattr(config.parallel, axis)) > 1:
            yield f"parallel.{axis}", size, "1 (parallel.data may be more)"
    if config.train.compile:
        yield "train.compile", True, "false (train.cuda_graphs may be true)"
    if config.lora.lora_dropout:
        yield "lora.lora_dropout", config.lora.lora_dropout, "0.0"


def _of_engine(config: EngineConfig) -> Iterator[tuple[str, Any, str]]:
    if config.device == "cpu":
        yield "train.device", "cpu", "'cuda' or 'auto'"
    if config.sampler.parallel.tensor > 1:
        yield "sampler.parallel.tensor", config.sampler.parallel.tensor, "1 (sampler.engines may be more)"
    if config.checkpoint_engine.content != "adapter":
        yield "checkpoint_engine.content", config.checkpoint_engine.content, "'adapter'"
