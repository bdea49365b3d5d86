# SPDX-License-Identifier: Apache-2.0
"""Read and write PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``."""

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
from megarl.lora.targets.parameters import as_peft_reads
from megarl.lora.targets.resolve import expand_all_linear, order_independent
from megarl.peft.pattern_order import SIDE_A, restore_order
from megarl.peft.rules import read_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Suffixes of the modules in which PEFT wraps stacked experts.
STACKED = (".experts", ".experts.base_layer")


def config_dict(config: LoraConfig, names: WeightMap) -> dict[str, Any]:
    """Return ``adapter_config.json`` for a config: ``all-linear`` as a list of names, patterns independent of order."""
    return plain_config(order_independent(expand_all_linear(config, names), names))


def plain_config(config: LoraConfig) -> dict[str, Any]:
    """Return ``adapter_config.json`` for a config as it is."""
    plain = config.to_dict()
    plain.pop("runtime_config", None)
    plain["inference_mode"] = True
    for key, value in plain.items():
        plain[key] = sorted(value) if isinstance(value, set) else value
    return plain


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write a PEFT directory atomically.

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
    """Copy a PEFT directory with its experts in the form that ``lora.save_experts`` names.

    Raises:
        AdapterError: a file is damaged.
        UnsupportedError: see ``arrange_config``.
    """
    try:
        tensors = load_file(source / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{source / WEIGHTS} cannot be read ({error}); it is truncated or damaged") from error
    tensors, config = arrange(tensors, as_peft_reads(load_peft_config(source), names), names, experts)
    write(path, tensors, config_dict(config, names))


def load_peft_config(path: str | Path) -> LoraConfig:
    """Read ``adapter_config.json``. The initialisation of the saved matrices is dropped, since it no longer matters.

    Raises:
        AdapterError: the file is missing, is not JSON or not LoRA, or has a field that PEFT does not know.
        UnsupportedError: a setting is not supported, or the initialisation also changed the base model (PiSSA, OLoRA).
    """
    file = user_path("adapter", path) / CONFIG
    config = read_config(read_json(file, "PEFT adapter directory", AdapterError), str(file))
    config.init_lora_weights = True
    if len(config.rank_pattern) > 1:
        config = restore_order(config, _ranks(file.with_name(WEIGHTS)), file)
    return config


def _ranks(file: Path) -> dict[str, int]:
    """Map each unstacked module to its rank. Empty if the file is missing or damaged, which ``load`` reports."""
    try:
        with safe_open(str(file), framework="pt") as source:
            a_names = {match[1]: name for name in source.keys() if (match := SIDE_A.fullmatch(name))}  # noqa: SIM118
            plain = {module: name for module, name in a_names.items() if not module.endswith(STACKED)}
            return {module: source.get_slice(name).get_shape()[0] for module, name in plain.items()}
    except (SafetensorError, OSError):
        return {}
