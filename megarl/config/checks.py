# SPDX-License-Identifier: Apache-2.0
"""Check a config against the files that it names. Every message names the field, its value and a fix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.back_ends import check_backend
from megarl.config.cuda_graphs import check_graphs
from megarl.config.numerics import check_engine_numerics, check_trainer_numerics
from megarl.config.run import RunConfig
from megarl.config.sections.model import ModelConfig
from megarl.config.sections.parallel import ParallelConfig
from megarl.config.sections.sampler import EngineParallel
from megarl.config.trainer import TrainerConfig
from megarl.errors import ConfigError, UnsupportedError
from megarl.families import FAMILIES, add_family, moe_of
from megarl.families.base import COUNTS, SIZES
from megarl.files import read_json, user_path

# Sizes that config.json may leave out or set to null.
OPTIONAL = set(SIZES[SIZES.index("num_key_value_heads") :]) | set(COUNTS)


def check_run(config: RunConfig, folder: Path | None = None) -> None:
    """Check a run's config against the files that it names.

    Args:
        config: the config.
        folder: folder of the recipe, to which the path of ``model.family`` refers; None: the current folder.

    Raises:
        ConfigError: a value contradicts the model's ``config.json``, or a file is missing.
        UnsupportedError: a layout is not proven for the model.
    """
    add_own_family(config.model, folder)
    shape = read_model_shape(config.model.path)
    check_trainer(config.trainer, shape)
    check_engine_fits_model(config.sampler.parallel, shape)
    check_engine_numerics(config.engine, shape)
    prompt, response = config.sampler.max_prompt_tokens, config.longest_response
    longest = shape.get("max_position_embeddings")
    if longest and prompt + response > longest:
        section = "sampler" if response == config.sampler.max_response_tokens else "eval.tasks[]"
        raise ConfigError(
            f"sampler.max_prompt_tokens ({prompt}) + {section}.max_response_tokens ({response}) = {prompt + response} "
            f"exceeds the model's max_position_embeddings ({longest})"
        )
    adapter = config.lora.init_from
    if adapter and not (user_path("lora.init_from", adapter) / "adapter_config.json").is_file():
        raise ConfigError(f"lora.init_from is '{adapter}', which holds no adapter_config.json; give a PEFT folder")


def add_own_family(model: ModelConfig, folder: Path | None = None) -> None:
    """Register ``model.family``, if it is set, for this process.

    Args:
        model: the section.
        folder: see ``check_run``.

    Raises:
        ConfigError: it cannot be loaded, or it is not for this model.
    """
    family = add_family(model.family, folder)
    if family is None:
        return
    model_type = read_model_shape(model.path).get("model_type")
    if model_type not in family.model_types:
        raise ConfigError(
            f"model.family is '{model.family}' for model_type '{family.model_types[0]}', but the model's config.json "
            f"has '{model_type}'; set model.family=null"
        )


def check_trainer(config: TrainerConfig, shape: Mapping[str, Any]) -> None:
    """Check layout, back end and CUDA graphs against the model's ``config.json``.

    Raises:
        ConfigError: a size of the model is not a multiple of the axis that splits it.
        UnsupportedError: a layout is not proven for the model.
    """
    check_backend(config, shape)
    check_trainer_numerics(config, shape)
    check_layout_fits_model(config.parallel, shape)
    check_graphs(config, shape)


def read_model_shape(path: str) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a Hugging Face folder.

    Raises:
        ConfigError: the folder or the file is missing, or the file is not JSON.
    """
    file = user_path("model.path", path) / "config.json"
    if not file.parent.is_dir():
        raise ConfigError(f"model.path is '{path}', which is not a folder; give a local Hugging Face folder")
    if not file.is_file():
        raise ConfigError(f"model.path is '{path}', which holds no config.json; give a Hugging Face folder")
    shape = read_json(file, "model.path", ConfigError)
    for key in (*SIZES, *COUNTS):
        if type(shape.get(key, 1)) is not int and not (key in OPTIONAL and shape[key] is None):
            raise ConfigError(f"model.path: {file} has {key} = {shape[key]!r}; it must be an integer")
    return shape


def check_layout_fits_model(parallel: ParallelConfig, shape: Mapping[str, Any]) -> None:
    """Check that the layout divides the model's heads and layers evenly.

    Raises:
        ConfigError: a size of the model is not a multiple of the axis that splits it.
    """
    _check_divides("parallel.tensor", parallel.tensor, "num_attention_heads", shape)
    _check_kv_heads("parallel.tensor", parallel.tensor, shape)
    _check_divides("parallel.tensor", parallel.tensor, "intermediate_size", shape)
    family = FAMILIES.get(str(shape.get("model_type")))
    for name, size in (family.splits(shape) if family else {}).items():
        _check_divides("parallel.tensor", parallel.tensor, name, {name: size})
    _check_experts(parallel, shape)
    stages = parallel.pipeline * parallel.virtual_pipeline
    axis = "parallel.pipeline" if parallel.virtual_pipeline == 1 else "parallel.pipeline x virtual_pipeline"
    layers = shape.get("num_hidden_layers")
    if layers and layers < stages:
        raise ConfigError(f"{axis} ({stages}) exceeds the model's num_hidden_layers ({layers}); a stage needs a layer")


def check_engine_fits_model(parallel: EngineParallel, shape: Mapping[str, Any]) -> None:
    """Check that vLLM can split the model over an engine's ranks.

    Raises:
        ConfigError: a size of the model is not a multiple of ``sampler.parallel.tensor``, or there are fewer experts
            than ranks.
    """
    axis, tensor = "sampler.parallel.tensor", parallel.tensor
    _check_divides(axis, tensor, "num_attention_heads", shape)
    _check_kv_heads(axis, tensor, shape)
    moe = moe_of(shape)
    if moe is not None:
        experts = moe.count_key(shape)
        _check_divides(axis, tensor, moe.inner_key, shape)
        if tensor > (shape.get(experts) or tensor):
            raise ConfigError(f"{axis} ({tensor}) must be at most the model's {experts} ({shape[experts]})")
    if moe is None or moe.says_dense(shape):
        _check_divides(axis, tensor, "intermediate_size", shape)


def _check_kv_heads(axis: str, size: int, shape: Mapping[str, Any]) -> None:
    """Check that each rank gets several KV heads, or that each head is on several ranks."""
    heads = shape.get("num_key_value_heads")
    if heads and heads % size and size % heads:
        raise ConfigError(
            f"{axis} ({size}) must divide the model's num_key_value_heads ({heads}) or be a multiple of it"
        )


def _check_experts(parallel: ParallelConfig, shape: Mapping[str, Any]) -> None:
    """Check that experts divide evenly over the tensor x context x data ranks of a pipeline stage."""
    moe = moe_of(shape)
    if moe is None:
        for axis in ("expert", "expert_tensor"):
            if getattr(parallel, axis) > 1:
                raise ConfigError(f"parallel.{axis} is {getattr(parallel, axis)}, but the model has no experts; use 1")
        return
    _check_divides("parallel.expert", parallel.expert, moe.count_key(shape), shape)
    _check_divides("parallel.expert_tensor", parallel.expert_tensor, "hidden_size", shape)
    _check_divides("parallel.expert_tensor", parallel.expert_tensor, moe.inner_key, shape)
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (parallel.expert * parallel.expert_tensor):
        raise ConfigError(
            f"parallel.expert ({parallel.expert}) x expert_tensor ({parallel.expert_tensor}) must divide "
            f"parallel.tensor ({parallel.tensor}) x context ({parallel.context}) x data ({parallel.data}) = {ranks}"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise UnsupportedError(
            "parallel.sequence is false with parallel.tensor > 1 and a mixture of experts; supported is true"
        )


def _check_divides(axis: str, size: int, key: str, shape: Mapping[str, Any]) -> None:
    value = shape.get(key)
    if value and value % size:
        allowed = [n for n in range(1, min(value, 4096) + 1) if value % n == 0]
        raise ConfigError(
            f"{axis} ({size}) must divide the model's {key} ({value}); allowed: {', '.join(map(str, allowed[:12]))}"
        )
