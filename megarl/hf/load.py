# SPDX-License-Identifier: Apache-2.0
"""Load a model of transformers with its weights, all of them, and put PEFT's adapters on it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megarl.errors import AdapterError, ModelError, UnsupportedError, nearest
from megarl.hf.attention import NAME
from megarl.peft.rules import check_supported
from megarl.peft.spec import AdapterSpec

# Where PEFT holds matrices by the adapter's name: those of an embedding in the second.
KINDS = (torch.nn.ModuleDict, torch.nn.ParameterDict)


def load_config(path: str | Path) -> PreTrainedConfig:
    """Read ``config.json``. Dropout of the base model is switched off: the sampler has none.

    Raises:
        ModelError: transformers does not know the ``model_type`` or rejects a value.
        UnsupportedError: the weights are quantised, or the model has images or sound besides text.
    """
    try:
        config = AutoConfig.from_pretrained(Path(path).expanduser())
    except Exception as error:  # transformers may raise anything on unexpected values
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}/config.json: transformers rejects it: {reason or type(error).__name__}") from error
    if config.get_text_config() is not config:
        raise UnsupportedError(
            f"{path}/config.json: model_type '{config.model_type}' has other parts than its text model; write the text "
            "model out and take that folder (docs/transformers.md says how)"
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedError(
            f"{path}/config.json has a quantization_config; write the model out in bfloat16, dequantised, and take "
            "that folder"
        )
    for key, value in vars(config).items():
        if (key.endswith(("dropout", "_pdrop")) or key.startswith("dropout")) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def load_causal(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model onto the CPU, frozen, in evaluation mode, with attention within packs.

    Raises:
        ModelError: the folder is damaged; or a tensor is missing, unexpected, of another shape, or not finite.
        UnsupportedError: the model's attention cannot be replaced.
    """
    config, folder = load_config(path), Path(path).expanduser()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report below names them
        )
    except Exception as error:  # so may its loader
        reason = " ".join(str(error).split())
        raise ModelError(f"model.path '{path}': transformers cannot load it: {reason[:500]}") from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found := sorted(map(_name, report.get(problem) or ())):
            what = problem.removesuffix("_keys")
            raise ModelError(
                f"model.path '{path}': tensor '{found[0]}' is {what} ({len(found)} such tensors); transformers would "
                "train another model"
            )
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in torch.aminmax(parameter.detach())):
            raise ModelError(f"'{name}' in {path} holds a number that is not finite; the file is damaged")
    return model.requires_grad_(False).eval()


def _name(problem: Any) -> str:
    """Return the name of a tensor that transformers reports alone or with its shapes."""
    return str(problem if isinstance(problem, str) else problem[0])


def add_adapters(causal: PreTrainedModel, specs: Sequence[AdapterSpec]) -> PeftModel:
    """Put adapters on a model, in its dtype. The first one is active; all are frozen.

    Raises:
        AdapterError: PEFT refuses a config, or a name is taken or invalid.
        UnsupportedError: a setting is not supported.
    """
    first, *others = specs
    _check_names([spec.name for spec in specs])
    for spec in specs:
        check_supported(spec.config)
    try:
        model = PeftModel(causal, _own(first), adapter_name=first.name, autocast_adapter_dtype=False)
        for spec in others:
            model.add_adapter(spec.name, _own(spec), autocast_adapter_dtype=False)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise AdapterError(f"adapter config: PEFT refuses it for this model: {error}") from error
    for spec in specs:
        _check_found(spec.config, model)
    return model.requires_grad_(False)


def _check_names(names: Sequence[str]) -> None:
    """Refuse a name that is taken, or that PEFT's dictionaries cannot hold."""
    for index, name in enumerate(names):
        if not name.isidentifier() or any(hasattr(kind, name) for kind in KINDS):
            raise AdapterError(f"adapter name '{name}' cannot be used; take letters, digits and underscores")
        if name in names[:index]:
            raise AdapterError(f"the model already has an adapter named '{name}'; give another name")


def _check_found(config: LoraConfig, model: PeftModel) -> None:
    """Refuse names that match nothing; PEFT ignores them as long as another name of the list matches."""
    found = {
        "target_modules": set(model.targeted_module_names),
        "target_parameters": set(model.targeted_parameter_names),
    }
    for field, names in found.items():
        asked = getattr(config, field)
        for target in () if isinstance(asked, str) else sorted(asked or ()):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                modules = {name.rpartition(".")[2] for name, _ in model.get_base_model().named_modules()}
                raise AdapterError(
                    f"adapter config: {field} has '{target}'{nearest(target, modules)}, which is not in the model"
                )


def _own(spec: AdapterSpec) -> Any:
    """Return a copy of the config, since PEFT writes the modules that it found into it."""
    return copy.deepcopy(spec.config)
