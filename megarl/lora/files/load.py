# SPDX-License-Identifier: Apache-2.0
"""Load a PEFT directory into an adapter that is on a model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open

from megarl.errors import AdapterError, nearest
from megarl.families import WeightMap
from megarl.files import user_path
from megarl.lora.files.peft_folder import CONFIG, WEIGHTS, load_peft_config
from megarl.lora.files.stacked_experts import AdapterFile, places_of
from megarl.lora.layers.vocabulary import check_tables
from megarl.lora.targets.parameters import as_read
from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE, resolve_targets
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups
from megarl.peft.names import BASE_WEIGHT, PREFIX
from megarl.peft.rules import rank_and_scaling


@dataclass(frozen=True)
class Holder:
    """What is to be filled.

    Attributes:
        config: of the adapter on the model.
        names: the model's.
        tensors: this rank's parts of its matrices, under their names in PEFT's file.
        layers: adapted part's name -> its layer on this rank.
        groups: of the model.
    """

    config: LoraConfig
    names: WeightMap
    tensors: Sequence[ShardedTensor]
    layers: Mapping[str, torch.nn.Module]
    groups: Groups


def load_matrices(path: str | Path, holder: Holder) -> None:
    """Check a PEFT directory against an adapter, all of it, then fill the adapter.

    Raises:
        AdapterError: another adapter's, a damaged file, a name or shape that does not fit; nothing was changed.
    """
    folder = user_path("adapter", path)
    _check_same_targets(load_peft_config(folder), holder.config, holder.names, folder)
    file = folder / WEIGHTS
    try:
        source = safe_open(str(file), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
    with source:
        targets = resolve_targets(holder.config, holder.names)
        matrices = AdapterFile(source, targets, holder.names)
        _check_names(set(source.keys()), targets, holder.names, file)
        for tensor in holder.tensors:
            shape = tuple(matrices.get_slice(tensor.name).get_shape())
            if shape != tensor.shape:
                raise AdapterError(
                    f"{file}: '{tensor.name}' has shape {list(shape)}, the model needs {list(tensor.shape)}"
                )
        stored = sorted(_base_weights(targets) & set(source.keys()))
        check_tables(source, stored, holder.layers, holder.groups)
        for tensor in holder.tensors:
            tensor.load(matrices.get_slice(tensor.name), holder.groups)


def _check_same_targets(config: LoraConfig, own: LoraConfig, names: WeightMap, folder: Path) -> None:
    """The file's targets, ranks and scalings must be those the layers were built with."""
    config = as_read(config, names)
    theirs, ours = resolve_targets(config, names), resolve_targets(own, names)
    for name in sorted(theirs.keys() ^ ours.keys()):
        where = "adapted in the file but not here" if name in theirs else "adapted here but not in the file"
        raise AdapterError(f"{folder / CONFIG}: '{name}' is {where}; apply the file's own config (load_peft_config)")
    for name in sorted(ours):
        here, there = rank_and_scaling(own, ours[name]), rank_and_scaling(config, theirs[name])
        if here != there:
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' has (rank, scaling) {there} in the file and {here} here; apply the "
                "file's own config (load_peft_config)"
            )
        if ours[name] != theirs[name] and bool(config.target_parameters) != bool(own.target_parameters):
            built, read = ("target_parameters" if c.target_parameters else "target_modules" for c in (own, config))
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' is adapted by {read} in the file and by {built} here; apply the file's "
                "own config (load_peft_config)"
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
