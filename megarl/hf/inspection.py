# SPDX-License-Identifier: Apache-2.0
"""Check a model of transformers and its adapter before any rank is started, without reading weights."""

import torch
from transformers import AutoModelForCausalLM

from megarl.build import peft_config_of
from megarl.config import TrainerConfig
from megarl.errors import ModelError
from megarl.hf.attention import NAME
from megarl.hf.base_tensors import base_tensors
from megarl.hf.lengths import check_longest
from megarl.hf.load import add_adapters, load_config
from megarl.hf.network import Network
from megarl.model.weights.hf_folder import WeightFolder
from megarl.peft.spec import AdapterSpec
from megarl.peft.values import check_patterns


def inspect_model(config: TrainerConfig, *, sends_base: bool = False) -> None:
    """Build the model without memory for its weights, and put the adapter on it.

    Args:
        config: the trainer's config.
        sends_base: True checks that the base's weights can be sent to a sampler.

    Raises:
        AdapterError: PEFT refuses the adapter, or a pattern matches nothing.
        ConfigError: the longest sequence exceeds the model's positions.
        ModelError: the folder is incomplete, or transformers rejects its config.
        UnsupportedError: the model or a setting is not supported.
    """
    path, hf_config = config.model.path, load_config(config.model.path)
    WeightFolder(path)
    check_longest(hf_config, config)
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                hf_config, dtype=getattr(torch, config.model.dtype), attn_implementation=NAME
            )
    except Exception as error:  # transformers may raise anything on unexpected values
        reason = " ".join(str(error).split())
        raise ModelError(f"model.path '{path}': transformers cannot build it: {reason[:500]}") from error
    Network(causal)
    peft_config = peft_config_of(config)
    model = add_adapters(causal, [AdapterSpec(peft_config)])
    if not config.lora.init_from:
        check_patterns(peft_config, model.targeted_module_names + model.targeted_parameter_names)
    if sends_base:
        base_tensors(model, path, untied=False)
