# SPDX-License-Identifier: Apache-2.0
"""Load a PEFT directory into an adapter on a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open

from megarl.errors import AdapterError
from megarl.families import WeightMap
from megarl.files import user_path
from megarl.lora.files.contents import base_weights, check_contents
from megarl.lora.files.peft_folder import CONFIG, WEIGHTS, load_peft_config
from megarl.lora.files.stacked_experts import AdapterFile
from megarl.lora.layers.vocabulary import check_tables
from megarl.lora.targets.parameters import as_peft_reads
from megarl.lora.targets.resolve import resolve_targets
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups
from megarl.peft.rules import rank_and_scaling


@dataclass(frozen=True)
class LoadTarget:
    """The adapter to be filled.

    Attributes:
        config: config of the adapter on the model.
        names: tensor names of the model.
        tensors: this rank's parts of the adapter's matrices, under their names in PEFT's file.
        layers: maps each adapted part's name to its layer on this rank.
        groups: process groups of the model.
    """

    config: LoraConfig
    names: WeightMap
    tensors: Sequence[ShardedTensor]
    layers: Mapping[str, torch.nn.Module]
    groups: Groups


def load_matrices(path: str | Path, target: LoadTarget) -> None:
    """Check a whole PEFT directory against an adapter, then fill the adapter.

    Raises:
        AdapterError: it belongs to another adapter or model, a file is damaged, or a name or shape does not fit.
            Nothing was changed.
    """
    folder = user_path("adapter", path)
    _check_same_targets(load_peft_config(folder), target.config, target.names, folder)
    file = folder / WEIGHTS
    try:
        source = safe_open(str(file), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
    with source:
        targets = resolve_targets(target.config, target.names)
        matrices = AdapterFile(source, targets, target.names)
        check_contents(matrices, targets, file)
        for tensor in target.tensors:
            shape = tuple(matrices.get_slice(tensor.name).get_shape())
            if shape != tensor.shape:
                raise AdapterError(
                    f"{file}: '{tensor.name}' has shape {list(shape)}, the model needs {list(tensor.shape)}"
                )
        stored = sorted(base_weights(targets) & set(source.keys()))
        check_tables(source, stored, target.layers, target.groups)
        for tensor in target.tensors:
            tensor.load(matrices.get_slice(tensor.name), target.groups)


def _check_same_targets(config: LoraConfig, applied: LoraConfig, names: WeightMap, folder: Path) -> None:
    """Refuse a file whose targets, ranks or scalings are not those that the layers were built with."""
    config = as_peft_reads(config, names)
    theirs, ours = resolve_targets(config, names), resolve_targets(applied, names)
    for name in sorted(theirs.keys() ^ ours.keys()):
        problem = "adapted in the file but not here" if name in theirs else "adapted here but not in the file"
        raise AdapterError(f"{folder / CONFIG}: '{name}' is {problem}; apply the file's own config (load_peft_config)")
    for name in sorted(ours):
        here, there = rank_and_scaling(applied, ours[name]), rank_and_scaling(config, theirs[name])
        if here != there:
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' has (rank, scaling) {there} in the file and {here} here; apply the "
                "file's own config (load_peft_config)"
            )
        if ours[name] != theirs[name] and bool(config.target_parameters) != bool(applied.target_parameters):
            built, read = ("target_parameters" if c.target_parameters else "target_modules" for c in (applied, config))
            raise AdapterError(
                f"{folder / CONFIG}: '{name}' is adapted by {read} in the file and by {built} here; apply the file's "
                "own config (load_peft_config)"
            )
