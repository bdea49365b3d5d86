# SPDX-License-Identifier: Apache-2.0
"""Merge an adapter into base weights: out of place, in fp32, rounded once."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import AdapterError, ModelError
from megarl.families import FAMILIES
from megarl.families.base import EMBEDDING, OUTPUT
from megarl.files import write_directory
from megarl.lora.files.contents import check_contents
from megarl.lora.files.named_pairs import NamedPairs
from megarl.lora.files.peft_folder import WEIGHTS, load_peft_config
from megarl.lora.files.stacked_experts import AdapterFile
from megarl.lora.targets.parameters import as_peft_reads
from megarl.lora.targets.resolve import EMBED_MODULE, resolve_targets, unties
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import INDEX, WeightFolder, parse_json, read_config
from megarl.model.weights.sharded_tensor import Update
from megarl.model.weights.sums import add_update
from megarl.peft.rules import rank_and_scaling

SHARD_BYTES = 4 << 30


def merge_folder(model: Path, adapter: Path, out: Path) -> int:
    """Write a Hugging Face folder with the adapter merged, holding one source file in memory at a time.

    If the embedding or lm_head is adapted and the base ties them, the written model does not tie them, as after PEFT's
    merge.

    Args:
        model: the base model's folder; not changed.
        adapter: a PEFT directory.
        out: the folder to write; must not exist. It appears complete or not at all.

    Returns:
        The number of merged tensors.

    Raises:
        AdapterError: the adapter is damaged or does not fit the model.
        UnsupportedError: the model's family is not listed, and the adapter has other than linears.
        ModelError: the base folder is incomplete, or ``out`` exists.
    """
    if out.exists():
        raise ModelError(f"--out '{out}' exists already; name a new folder")
    folder = WeightFolder(model)
    try:
        with safe_open(str(adapter / WEIGHTS), framework="pt", device="cpu") as opened:
            hf_config, source, targets, config = open_pairs(opened, adapter, model)
            untie = unties(hf_config, targets)
            held = set(folder.file_of) | ({OUTPUT[1]} if untie else set())
            if lost := sorted(f"{name}.weight" for name in targets if f"{name}.weight" not in held):
                raise AdapterError(f"{adapter} adapts '{lost[0]}', which {model} lacks")
            with write_directory(out) as partial:
                for file in sorted(set(folder.file_of.values())):
                    tensors = {
                        name: _merged(name, tensor, source, targets, config)
                        for name, tensor in _base_tensors(file, untie)
                    }
                    save_file(tensors, str(partial / file.name), metadata={"format": "pt"})
                _copy_others(model, partial)
                if (model / INDEX).is_file():
                    shutil.copy2(model / INDEX, partial / INDEX)
                if untie:
                    _note_untied(partial)
    except (SafetensorError, FileNotFoundError) as error:
        raise AdapterError(
            f"{adapter / WEIGHTS} cannot be read ({error}); it is missing, truncated or damaged"
        ) from error
    return len(targets)


class Pairs(NamedTuple):
    """An adapter's matrices as they belong to a model.

    Attributes:
        hf_config: the model's config.json; completed if its family is listed.
        source: gives the pair of a module.
        targets: from ``resolve_targets``.
        config: the adapter's config as PEFT reads it.
    """

    hf_config: Mapping[str, Any]
    source: AdapterFile | NamedPairs
    targets: Mapping[str, str]
    config: LoraConfig


def open_pairs(opened: Any, adapter: Path, model: Path) -> Pairs:
    """Find an adapter's matrices.

    Args:
        opened: its weights file, from ``safe_open``.
        adapter: the PEFT directory.
        model: the base model's folder.

    Raises:
        AdapterError, ModelError, UnsupportedError: as ``merge_folder``.
    """
    plain, config = parse_json(model / "config.json"), load_peft_config(adapter)
    if plain.get("model_type") not in FAMILIES:
        pairs = NamedPairs(opened, adapter / WEIGHTS, config)
        return Pairs(plain, pairs, pairs.targets, config)
    hf_config = read_config(model)
    names = names_of(hf_config)
    config = as_peft_reads(config, names)
    targets = resolve_targets(config, names)
    matrices = AdapterFile(opened, targets, names)
    check_contents(matrices, targets, adapter / WEIGHTS)
    return Pairs(hf_config, matrices, targets, config)


def write_merged(stream: Iterable[tuple[str, torch.Tensor]], model: Path, out: Path) -> None:
    """Write a stream of whole merged tensors as a Hugging Face folder. Collective; rank 0 writes.

    Args:
        stream: from ``MegatronModel.export_merged``.
        model: the base model's folder. Everything but its weights is copied.
        out: the folder to write. It appears complete or not at all, and replaces an old one.
    """
    if dist.get_rank() != 0:
        for _ in stream:
            pass
        return
    with write_directory(out) as partial:
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(_shards(stream)):
            file = f"model-{index + 1:05d}.safetensors"
            save_file(shard, str(partial / file), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            dtype = str(next(iter(shard.values())).dtype).removeprefix("torch.")
        (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        _copy_others(model, partial)
        config = parse_json(model / "config.json")
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        if OUTPUT[1] in weight_map:  # tied embeddings appear here only if the merge made them differ
            config["tie_word_embeddings"] = False
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in stream:
        shard[name] = tensor.to("cpu", copy=True)
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _copy_others(model: Path, out: Path) -> None:
    """Copy everything in the folder except the weights and their index."""
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy2(file, out / file.name)


def _base_tensors(file: Path, untie: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one safetensors file; with ``untie`` the embedding also as lm_head."""
    with safe_open(str(file), framework="pt", device="cpu") as source:
        for name in source.keys():  # noqa: SIM118
            if untie and name == OUTPUT[1]:
                continue  # a stored copy of the embedding
            tensor = source.get_tensor(name)
            yield name, tensor
            if untie and name == EMBEDDING[1]:
                yield OUTPUT[1], tensor.clone()


def _merged(
    name: str, tensor: torch.Tensor, adapter: AdapterFile | NamedPairs, targets: Mapping[str, str], config: LoraConfig
) -> torch.Tensor:
    """Return one tensor, with the adapter added if the tensor is a target."""
    module = name.removesuffix(".weight")
    if module not in targets:
        return tensor
    matrix_a, matrix_b = adapter.pair(module)
    if module == EMBED_MODULE:
        matrix_a, matrix_b = matrix_b.T, matrix_a.T
    if (matrix_b.shape[0], matrix_a.shape[1]) != tuple(tensor.shape):
        raise AdapterError(
            f"the adapter of '{module}' is for a {matrix_b.shape[0]} x {matrix_a.shape[1]} layer; the "
            f"model's is {tensor.shape[0]} x {tensor.shape[1]}"
        )
    return add_update(tensor, Update(matrix_a, matrix_b, rank_and_scaling(config, targets[module])[1]))


def _note_untied(folder: Path) -> None:
    """Record in config.json, and in the index if there is one, that lm_head has a weight of its own."""
    config = parse_json(folder / "config.json") | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = folder / INDEX
    if index.is_file():
        plain = json.loads(index.read_text())
        plain["weight_map"][OUTPUT[1]] = plain["weight_map"][EMBEDDING[1]]
        index.write_text(json.dumps(plain, indent=2) + "\n")
