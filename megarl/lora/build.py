# SPDX-License-Identifier: Apache-2.0
"""Build a model with an adapter in one call."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import LoraConfig as PeftConfig

from megarl.config import LoraConfig, ModelConfig, ParallelConfig, TrainConfig, TrainerConfig
from megarl.config.cross_sections import check_layout, check_switches
from megarl.config.load import parse_section
from megarl.hub import local_section
from megarl.lora.adapter import LoraAdapter
from megarl.lora.apply import apply_lora
from megarl.lora.files.peft_folder import load_peft_config
from megarl.model.adapter import Attach
from megarl.model.megatron_model import MegatronModel
from megarl.model.weights.base_tensors import load_base
from megarl.parallel.device import pick_device
from megarl.parallel.groups import Groups, init_groups
from megarl.parallel.rendezvous import ALONE


def attach(config: PeftConfig, *, seed: int = 0) -> Attach:
    """Return the function by which ``MegatronModel`` adds one adapter.

    Args:
        config: PEFT's config.
        seed: seed of the initialisation.
    """

    def apply(chunks: list[Any], hf_config: Mapping[str, Any], groups: Groups) -> LoraAdapter:
        return apply_lora(chunks, config, hf_config, seed=seed, groups=groups)

    return apply


def build_model(
    model: str | Path | ModelConfig | Mapping[str, Any],
    *,
    lora: LoraConfig | Mapping[str, Any] | None = None,
    parallel: ParallelConfig | Mapping[str, Any] | None = None,
    train: TrainConfig | Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    fill_base: Callable[..., None] = load_base,
) -> MegatronModel:
    """Build a frozen base model with a trainable adapter on this rank.

    A collective over the ranks that torchrun started. Without torchrun, the process is a group of one.

    Args:
        model: a Hugging Face folder, the id of a model on the hub, or the ``model`` section.
        lora: the ``lora`` section. With ``init_from`` the adapter's weights are loaded too.
        parallel: the ``parallel`` section; default: one rank.
        train: the ``train`` section, of which ``device``, ``seed``, ``micro_batch_tokens`` and the optimizer's settings
            are used.
        temperature: the policy is ``softmax(logits / temperature)``.
        fill_base: see ``MegatronModel``.

    Raises:
        ConfigError: a setting is wrong, or the number of processes is not the layout's.
        AdapterError, ModelError, UnsupportedError: see ``MegatronModel`` and ``apply_lora``.
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
    start = config.lora.init_from
    peft_config = (
        load_peft_config(start)
        if start
        else PeftConfig(task_type="CAUSAL_LM", base_model_name_or_path=config.model.path, **config.lora.peft_settings())
    )
    built = MegatronModel(config, groups, attach(peft_config, seed=config.train.seed), fill_base)
    if start:
        built.load_adapter(start)
    return built
