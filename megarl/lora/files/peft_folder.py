"""PEFT directories: ``adapter_config.json`` and ``adapter_model.safetensors``, as ``peft`` and vLLM read them."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megarl.errors import AdapterError, nearest
from megarl.families import WeightMap
from megarl.files import read_json, user_path, write_directory
from megarl.lora.files.arrangements import arrange
from megarl.lora.files.stacked_experts import AdapterFile, places_of
from megarl.lora.layers.vocabulary import check_tables
from megarl.lora.targets.parameters import as_read
from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE, resolve_targets, settle_patterns, spelt_out
from megarl.peft.names import BASE_WEIGHT, PREFIX
from megarl.peft.pattern_order import SIDE_A, restore_order
from megarl.peft.rules import rank_and_scaling, read_config

if TYPE_CHECKING:
    from megarl.lora.adapter import LoraAdapter

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
        targets = resolve_targets(adapter.config, adapter.names)
        matrices = AdapterFile(source, targets, adapter.names)
        _check_names(set(source.keys()), targets, adapter.names, file)
        tensors = adapter.tensors()
        for tensor in tensors:
            shape = tuple(matrices.get_slice(tensor.name).get_shape())
            if shape != tensor.shape:
                raise AdapterError(
                    f"{file}: '{tensor.name}' has shape {list(shape)}, the model needs {list(tensor.shape)}"
                )
        stored = sorted(_base_weights(targets) & set(source.keys()))
        check_tables(
            source, stored, {slot.part.name: slot.layer for slot in adapter.slots if slot.layer}, adapter.groups
        )
        for tensor in tensors:
            tensor.load(matrices.get_slice(tensor.name), adapter.groups)


def _check_same_targets(config: LoraConfig, adapter: "LoraAdapter", folder: Path) -> None:
    """The file's targets, ranks and scalings must be those the layers were built with."""
    config = as_read(config, adapter.names)
    theirs = resolve_targets(config, adapter.names)
    ours = resolve_targets(adapter.config, adapter.names)
    for name in sorted(theirs.keys() ^ ours.keys()):
        where = "adapted in the file but not here" if name in theirs else "adapted here but not in the file"
        raise AdapterError(f"{folder / CONFIG}: '{name}' is {where}; apply the file's own config (load_peft_config)")
    for name in sorted(ours):
        here, there = rank_and_scaling(adapter.config, ours[name]), rank_and_scaling(config, theirs[name])
        if here != there:
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' has (rank, scaling) {there} in the file and {here} here; apply the "
                "file's own config (load_peft_config)"
            )
        if ours[name] != theirs[name] and bool(config.target_parameters) != bool(adapter.config.target_parameters):
            own, read = (
                "target_parameters" if c.target_parameters else "target_modules" for c in (adapter.config, config)
            )
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' is adapted by {read} in the file and by {own} here; apply the file's own "
                "config (load_peft_config)"
            )


def _base_weights(names: Collection[str]) -> set[str]:
    """Names under which PEFT stores the base weights of an adapted vocabulary."""
    return {f"{PREFIX}{name}{BASE_WEIGHT}" for name in {EMBED_MODULE, OUTPUT_MODULE}.intersection(names)}


def _check_names(found: set[str], targets: Mapping[str, str], names: WeightMap, file: Path) -> None:
    """The file must hold the matrices of everything adapted in the whole model, and nothing else."""
    expected = {place.file for place in places_of(targets, names).values()}
    found = found - _base_weights(targets)
    if missing := sorted(expected - found):
        raise AdapterError(f"{file} lacks '{missing[0]}'{nearest(missing[0], found)} ({len(missing)} tensors missing)")
    if extra := sorted(found - expected):
        raise AdapterError(f"{file} holds '{extra[0]}', which nothing here uses ({len(extra)} unexpected tensors)")
