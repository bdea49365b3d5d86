"""PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``peft`` and vLLM read them."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import AdapterError, nearest
from megarl.files import user_path, write_directory
from megarl.lora.targets import (
    ALL_LINEAR,
    BASE_WEIGHT,
    EMBED_MODULE,
    OUTPUT_MODULE,
    PREFIX,
    check_supported,
    matrix_name,
    rank_and_scaling,
    resolve_targets,
    short_names,
)
from megarl.lora.vocabulary import check_tables
from megarl.model.families import WeightMap

if TYPE_CHECKING:
    from megarl.lora.adapter import LoraAdapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# PEFT's ``init_lora_weights`` that leave the base model as it is.
HARMLESS_STARTS = (True, False, "gaussian", "orthogonal")


def config_dict(config: LoraConfig, names: WeightMap) -> dict[str, Any]:
    """``adapter_config.json`` of a config, ``all-linear`` spelt out as PEFT saves it."""
    if config.target_modules == ALL_LINEAR:
        config = dataclasses.replace(config, target_modules=short_names(names.target_names()))
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


def load_peft_config(path: str | Path) -> LoraConfig:
    """Read ``adapter_config.json``. How the saved matrices once started no longer matters and is not kept, except where
    that start also changed the base model (PiSSA, OLoRA, ...).

    Raises:
        AdapterError: missing, not JSON, not LoRA, or a field PEFT does not know.
        UnsupportedError: a setting that is not supported.
    """
    file = user_path("adapter", path) / CONFIG
    try:
        plain = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist; give a PEFT adapter directory") from error
    except json.JSONDecodeError as error:
        raise AdapterError(f"{file} is not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("peft_type") != "LORA":
        kind = plain.get("peft_type") if isinstance(plain, dict) else type(plain).__name__
        raise AdapterError(f"{file}: peft_type is {kind!r}; supported is 'LORA'")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = sorted(key for key, value in plain.items() if key not in known and value)
    if unknown:
        raise AdapterError(
            f"{file}: unknown field '{unknown[0]}'{nearest(unknown[0], known)}; update peft or remove it"
        )
    config = LoraConfig(**{key: value for key, value in plain.items() if key in known and key != "runtime_config"})
    check_supported(config)
    if config.init_lora_weights in HARMLESS_STARTS:
        config.init_lora_weights = True
    return config


def load(path: str | Path, adapter: "LoraAdapter") -> None:
    """Check everything, then fill the adapter's matrices; see ``LoraAdapter.load``."""
    folder = user_path("adapter", path)
    _check_same_targets(load_peft_config(folder), adapter, folder)
    file = folder / WEIGHTS
    try:
        source = safe_open(str(file), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
    with source:
        _check_names(set(source.keys()), adapter, file)
        tensors = adapter.tensors()
        for tensor in tensors:
            shape = tuple(source.get_slice(tensor.name).get_shape())
            if shape != tensor.shape:
                raise AdapterError(
                    f"{file}: '{tensor.name}' has shape {list(shape)}, the model needs {list(tensor.shape)}"
                )
        stored = sorted(_base_weights(resolve_targets(adapter.config, adapter.names)) & set(source.keys()))
        check_tables(
            source, stored, {slot.part.name: slot.layer for slot in adapter.slots if slot.layer}, adapter.groups
        )
        for tensor in tensors:
            tensor.load(source.get_slice(tensor.name), adapter.groups)


def _check_same_targets(config: LoraConfig, adapter: "LoraAdapter", folder: Path) -> None:
    """The file's targets, ranks and scalings must be those the layers were built with."""
    theirs = resolve_targets(config, adapter.names)
    ours = resolve_targets(adapter.config, adapter.names)
    for name in sorted(theirs ^ ours):
        where = "adapted in the file but not here" if name in theirs else "adapted here but not in the file"
        raise AdapterError(f"{folder / CONFIG}: '{name}' is {where}; apply the file's own config (load_peft_config)")
    for name in sorted(ours):
        if rank_and_scaling(config, name) != rank_and_scaling(adapter.config, name):
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' has (rank, scaling) {rank_and_scaling(config, name)} in the file and "
                f"{rank_and_scaling(adapter.config, name)} here; apply the file's own config (load_peft_config)"
            )


def _base_weights(names: set[str]) -> set[str]:
    """Names under which PEFT stores the base weights of an adapted vocabulary."""
    return {f"{PREFIX}{name}{BASE_WEIGHT}" for name in names & {EMBED_MODULE, OUTPUT_MODULE}}


def _check_names(found: set[str], adapter: "LoraAdapter", file: Path) -> None:
    """The file must hold the matrices of every adapted module of the whole model, and nothing else."""
    names = resolve_targets(adapter.config, adapter.names)
    expected = {matrix_name(name, side) for name in names for side in "AB"}
    found = found - _base_weights(names)
    if missing := sorted(expected - found):
        raise AdapterError(f"{file} lacks '{missing[0]}'{nearest(missing[0], found)} ({len(missing)} tensors missing)")
    if extra := sorted(found - expected):
        raise AdapterError(f"{file} holds '{extra[0]}', which nothing here uses ({len(extra)} unexpected tensors)")
