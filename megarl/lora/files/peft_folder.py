# SPDX-License-Identifier: Apache-2.0
"""PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``peft`` and vLLM read them."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megarl.errors import AdapterError
from megarl.families import WeightMap
from megarl.files import read_json, user_path, write_directory
from megarl.lora.files.arrangements import arrange
from megarl.lora.targets.parameters import as_read
from megarl.lora.targets.resolve import settle_patterns, spelt_out
from megarl.peft.pattern_order import SIDE_A, restore_order
from megarl.peft.rules import read_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Ends of the modules that PEFT wraps stacked experts in.
STACKED = (".experts", ".experts.base_layer")


def config_dict(config: LoraConfig, names: WeightMap) -> dict[str, Any]:
    """``adapter_config.json`` of a config, ``all-linear`` spelt out as PEFT saves it, patterns settled."""
    config = settle_patterns(spelt_out(config, names), names)
    plain = config.to_dict()
    plain.pop("runtime_config", None)
    plain["inference_mode"] = True
    for key, value in plain.items():
        plain[key] = sorted(value) if isinstance(value, set) else value
    return plain


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Put a PEFT directory in place by a rename.

    Raises:
        AdapterError: the directory cannot be written.
    """
    try:
        with write_directory(path) as partial:
            save_file(tensors, str(partial / WEIGHTS), metadata={"format": "pt"})
            (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"adapter directory '{path}' cannot be written: {error}") from error


def convert(source: Path, path: Path, names: WeightMap, experts: str) -> None:
    """Copy a PEFT directory with its experts as ``lora.save_experts`` names them.

    Raises:
        AdapterError: a damaged file.
        UnsupportedError: see ``arrange_config``.
    """
    try:
        tensors = load_file(source / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{source / WEIGHTS} cannot be read ({error}); it is truncated or damaged") from error
    tensors, config = arrange(tensors, as_read(load_peft_config(source), names), names, experts)
    write(path, tensors, config_dict(config, names))


def load_peft_config(path: str | Path) -> LoraConfig:
    """Read ``adapter_config.json``. How the saved matrices once started no longer matters and is not kept.

    Raises:
        AdapterError: missing, not JSON, not LoRA, or a field PEFT does not know.
        UnsupportedError: a setting that is not supported, or a start that also changed the base model (PiSSA, OLoRA).
    """
    file = user_path("adapter", path) / CONFIG
    config = read_config(read_json(file, "PEFT adapter directory", AdapterError), str(file))
    config.init_lora_weights = True
    if len(config.rank_pattern) > 1:
        config = restore_order(config, _ranks(file.with_name(WEIGHTS)), file)
    return config


def _ranks(file: Path) -> dict[str, int]:
    """Module -> rank, of those that are not stacked; empty where the file is missing or damaged: ``load`` says so."""
    try:
        with safe_open(str(file), framework="pt") as source:
            found = {match[1]: name for name in source.keys() if (match := SIDE_A.fullmatch(name))}  # noqa: SIM118
            plain = {module: name for module, name in found.items() if not module.endswith(STACKED)}
            return {module: source.get_slice(name).get_shape()[0] for module, name in plain.items()}
    except (SafetensorError, OSError):
        return {}
