# SPDX-License-Identifier: Apache-2.0
"""Build a model with adapters on this rank, by the back end that ``model.backend`` names."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from peft import LoraConfig as PeftConfig

from megarl.config import LoraConfig, ModelConfig, ParallelConfig, TrainConfig, TrainerConfig
from megarl.config.back_ends import TRANSFORMERS
from megarl.config.checks import read_model_shape
from megarl.config.cross_sections import check_layout, check_switches
from megarl.config.load import parse_section
from megarl.config.numerics import BITWISE, check_built_numerics
from megarl.errors import UnsupportedError
from megarl.hub import local_section
from megarl.lora.files.peft_folder import load_peft_config
from megarl.parallel.device import pick_device
from megarl.parallel.groups import Groups, init_groups
from megarl.parallel.rendezvous import ALONE
from megarl.peft.spec import AdapterSpec

if TYPE_CHECKING:
    from megarl.model.trained_model import TrainedModel


def build_model(
    model: str | Path | ModelConfig | Mapping[str, Any],
    *,
    lora: LoraConfig | Mapping[str, Any] | None = None,
    parallel: ParallelConfig | Mapping[str, Any] | None = None,
    train: TrainConfig | Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    fill_base: Callable[..., None] | None = None,
) -> "TrainedModel":
    """Build a frozen base model with a trainable adapter on this rank.

    A collective over the ranks that torchrun started. Without torchrun, the process is a group of one.

    Args:
        model: a Hugging Face folder, the id of a model on the hub, or the ``model`` section. Its ``backend`` chooses
            between ``MegatronModel`` and ``TransformersModel``, which have the same methods.
        lora: the ``lora`` section. With ``init_from`` the adapter's weights are loaded too.
        parallel: the ``parallel`` section; default: one rank.
        train: the ``train`` section, of which ``device``, ``seed``, ``micro_batch_tokens`` and the optimizer's settings
            are used.
        temperature: the policy is ``softmax(logits / temperature)``.
        fill_base: see ``MegatronModel``.

    Raises:
        ConfigError: a setting is wrong, or the number of processes is not the layout's.
        AdapterError, ModelError, UnsupportedError: see ``MegatronModel``, ``TransformersModel`` and ``apply_lora``.
    """
    config = TrainerConfig(
        model=local_section(model),
        parallel=parse_section(ParallelConfig, "parallel", parallel),
        lora=parse_section(LoraConfig, "lora", lora),
        train=parse_section(TrainConfig, "train", train),
        temperature=temperature,
    )
    check_layout(config.parallel)
    check_switches(config.train)
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        os.environ.update(ALONE)
    groups = init_groups(config.parallel, pick_device(config.train.device), seed=config.train.seed)
    built = build_with(config, groups, [AdapterSpec(peft_config_of(config))], fill_base)
    if start := config.lora.init_from:
        built.load_adapter(start)
    return built


def build_with(
    config: TrainerConfig,
    groups: Groups,
    adapters: Sequence[AdapterSpec],
    fill_base: Callable[..., None] | None = None,
) -> "TrainedModel":
    """Build the model of a config with adapters, whose weights are not yet loaded. A collective.

    Args:
        config: the trainer's settings.
        groups: from ``init_groups``.
        adapters: the adapters; the first one is active.
        fill_base: see ``MegatronModel``.

    Raises:
        UnsupportedError: ``fill_base`` with transformers; else see ``build_model``.
    """
    if config.model.numerics == BITWISE:
        check_built_numerics(config, read_model_shape(config.model.path))
    if config.model.backend == TRANSFORMERS:
        if fill_base is not None:
            raise UnsupportedError("fill_base with model.backend 'transformers', which loads its weights itself")
        from megarl.hf.transformers_model import TransformersModel

        return TransformersModel(config, groups, adapters)
    from megarl.lora.build import attach_all
    from megarl.model.megatron_model import MegatronModel
    from megarl.model.weights.base_tensors import load_base

    return MegatronModel(config, groups, attach_all(adapters, seed=config.train.seed), fill_base or load_base)


def peft_config_of(config: TrainerConfig) -> PeftConfig:
    """Return PEFT's config of ``lora``: that of the adapter in ``init_from``, or one with the section's settings."""
    if config.lora.init_from:
        return load_peft_config(config.lora.init_from)
    return PeftConfig(task_type="CAUSAL_LM", base_model_name_or_path=config.model.path, **config.lora.peft_settings())
