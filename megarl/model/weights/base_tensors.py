# SPDX-License-Identifier: Apache-2.0
"""List the Hugging Face tensors of a built GPTModel chunk as ``ShardedTensor`` records, to load and to export."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch.nn.utils.parametrize import is_parametrized

from megarl.errors import ModelError, UnsupportedError
from megarl.families import WeightMap
from megarl.families.base import (
    EMBEDDING,
    FINAL_NORM,
    HF_LAYER,
    MCORE_LAYER,
    OUTPUT,
    LinearMap,
    VectorMap,
)
from megarl.model.weights.full_config import names_of
from megarl.model.weights.fusion import head_layout, part_copies, part_rows, part_views
from megarl.model.weights.hf_folder import WeightFolder
from megarl.model.weights.sharded_tensor import ShardedTensor, parameter_view, placed
from megarl.parallel.groups import Axis, Groups, current_groups


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the base layer below an adapter, or the module itself."""
    return getattr(module, "base_layer", module)


def layers_of(chunk: GPTModel) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield ``(global index from 0, layer)`` for the transformer layers of a chunk."""
    for layer in chunk.decoder.layers:
        yield layer.layer_number - 1, layer


def base_tensors(chunk: GPTModel, names: WeightMap, groups: Groups, *, untied: bool = False) -> list[ShardedTensor]:
    """List every base tensor of one model chunk under its Hugging Face name, without adapters.

    Args:
        chunk: model chunk, not wrapped in DDP, with or without adapters.
        names: the model's tensor names.
        groups: this rank's process groups.
        untied: True lists tied embeddings as two tensors.

    Raises:
        ModelError: a tensor of the mapping is absent, or a parameter of the chunk is not in the mapping.
    """
    tensors = (
        []
        if not chunk.pre_process
        else [_vocabulary(EMBEDDING, chunk.embedding.word_embeddings.weight, names.hf_config, groups)]
    )
    for index, layer in layers_of(chunk):
        hf_prefix = HF_LAYER.format(index)
        for linear in names.linears(index):
            tensors += _linear(linear, layer, hf_prefix, names, groups)
        tensors += [_vector(vector, layer, hf_prefix) for vector in names.vectors(index)]
    if chunk.post_process:
        tensors.append(_vector(FINAL_NORM, chunk, ""))
        if not chunk.share_embeddings_and_output_weights:
            tensors.append(_vocabulary(OUTPUT, chunk.output_layer.weight, names.hf_config, groups))
    _check_complete(chunk, [tensor for tensor in tensors if tensor.held(groups)])
    if untied and chunk.post_process and chunk.share_embeddings_and_output_weights:
        tensors.append(_vocabulary(OUTPUT, chunk.shared_embedding_or_output_weight(), names.hf_config, groups))
    return tensors


def tensors_to_fill(chunk: GPTModel, names: WeightMap, groups: Groups) -> list[ShardedTensor]:
    """List ``base_tensors``, and on the last stage its copy of tied embeddings, which is never exported."""
    tensors = base_tensors(chunk, names, groups)
    if chunk.share_embeddings_and_output_weights and chunk.post_process and not chunk.pre_process:
        tensors.append(_vocabulary(EMBEDDING, chunk.output_layer.weight, names.hf_config, groups))
    return tensors


def load_base(
    chunks: Sequence[GPTModel], path: str | Path, hf_config: Mapping[str, Any], groups: Groups | None = None
) -> None:
    """Fill the base weights of any GPTModel from a Hugging Face folder. Each rank reads only its slices.

    Args:
        chunks: this rank's chunks, not wrapped.
        path: the Hugging Face folder.
        hf_config: its parsed ``config.json``.
        groups: process groups; default: mcore's current ones.

    Raises:
        ModelError: a tensor is missing or has another shape, or the folder does not fill all parameters of the model.
        UnsupportedError: the family is not supported.
    """
    groups = groups or current_groups()
    folder, names = WeightFolder(path), names_of(hf_config)
    folder.check_names(names)
    for chunk in chunks:
        tensors = tensors_to_fill(chunk, names, groups)
        _check_all_used(folder, folder.load(tensors, groups), chunk)
        if chunk.share_embeddings_and_output_weights and chunk.pre_process:
            _check_tied(folder, tensors[0], groups)


def _check_all_used(folder: WeightFolder, used: set[str], chunk: GPTModel) -> None:
    """Refuse a folder with tensors of the chunk's layers that nothing uses: without them it is another model."""
    layers = tuple(HF_LAYER.format(index) for index, _ in layers_of(chunk))
    unused = {name for name in folder.file_of if name.startswith(layers)} - used
    # Old Llama folders store RoPE's frequencies, which follow from config.json.
    if lost := sorted(name for name in unused if not name.endswith(".rotary_emb.inv_freq")):
        raise ModelError(f"{folder.path} holds '{lost[0]}', which the model has no place for; check config.json")


def _check_tied(folder: WeightFolder, embedding: ShardedTensor, groups: Groups) -> None:
    """Refuse tied embeddings of which the folder stores two different copies: transformers does not tie those."""
    if OUTPUT[1] not in folder.file_of:
        return
    _, rank, size = groups.along(embedding.axis)
    table, output = folder.get_slice(embedding.name), folder.get_slice(OUTPUT[1])
    here = embedding.local_slice(rank, size)
    if table.get_shape() != output.get_shape() or not torch.equal(table[here], output[here]):
        raise ModelError(
            f"{folder.path}: config.json has tie_word_embeddings true, but '{OUTPUT[1]}' differs from "
            f"'{embedding.name}', and transformers uses both then; set it to false, or remove '{OUTPUT[1]}'"
        )


def _vocabulary(
    names: tuple[str, str], weight: torch.Tensor, hf_config: Mapping[str, Any], groups: Groups
) -> ShardedTensor:
    tensor = parameter_view(names[1], weight.data, (hf_config["vocab_size"], weight.shape[1]), 0)
    return dataclasses.replace(tensor, padded=weight.shape[0] * groups.topology.tensor)


def owner_of(linear: LinearMap, names: WeightMap, groups: Groups) -> int | None:
    """Return the expert-parallel rank that holds a routed expert's linear; None for a linear that all ranks hold."""
    return None if linear.expert is None else linear.expert // (names.num_experts // groups.topology.expert)


def find_linear(layer: torch.nn.Module, linear: LinearMap, names: WeightMap, groups: Groups) -> torch.nn.Module:
    """Return the module of a linear. For another rank's expert: this rank's expert at the same place (same shape).

    Raises:
        UnsupportedError: the layer has no such module.
    """
    path, module = path_of(linear, names, groups), layer
    for depth, step in enumerate(path.split(".")):
        child = getattr(module, step, None)
        if child is None:
            parent, kind = ".".join(path.split(".")[:depth]), type(module).__name__
            advice = "; build it with moe_grouped_gemm=False (SequentialMLP)" if "Grouped" in kind else ""
            if kind == "SharedExpertMLP":
                advice = "; build it with megarl.model.layers.experts.shared.SharedExperts"
            raise UnsupportedError(
                f"layer {layer.layer_number - 1} has no {path}, which should hold {linear.hf[0].format('N')}: its "
                f"{parent or 'layer'} is mcore's {kind}{advice}"
            )
        module = child
    return module


def path_of(linear: LinearMap, names: WeightMap, groups: Groups) -> str:
    """Return where in a layer ``find_linear`` looks."""
    if linear.expert is None:
        return linear.mcore
    return linear.mcore.format(linear.expert % (names.num_experts // groups.topology.expert))


def _linear(
    linear: LinearMap, layer: torch.nn.Module, hf_prefix: str, names: WeightMap, groups: Groups
) -> list[ShardedTensor]:
    """Return weight and bias of each part of one linear."""
    module = unwrap(find_linear(layer, linear, names, groups))
    if is_parametrized(module):
        raise UnsupportedError(
            f"{hf_prefix}{linear.hf[0]} is a {type(module).__name__}, whose weight is computed: it can be neither read "
            "from a Hugging Face folder nor exported; load the base model before it is parametrised"
        )
    heads = head_layout(layer.config)
    axis: Axis = "tensor" if linear.expert is None else "expert_tensor"
    size = groups.along(axis)[2]
    tensors = []
    for attribute in ("weight", "bias"):
        parameter = getattr(module, attribute, None)
        if parameter is None or parameter.numel() == 0:
            continue
        data = parameter.data
        split = {"column": 0, "row": 1 if attribute == "weight" else None, "replicated": None}[linear.split]
        rows, views = part_rows(data.shape[0], linear.fusion, heads), part_views(data, linear.fusion, heads)
        for hf, view, part, copies in zip(linear.hf, views, rows, part_copies(linear.fusion, heads), strict=True):
            shape = [part * (size // copies if split == 0 else 1), *data.shape[1:]]
            if split == 1:
                shape[1] *= size
            tensor = parameter_view(f"{hf_prefix}{hf}.{attribute}", view, tuple(shape), split)
            tensor = dataclasses.replace(tensor, copies=copies)
            tensors.append(placed(tensor, axis, owner_of(linear, names, groups), groups))
    return tensors


def _vector(vector: VectorMap, root: torch.nn.Module, hf_prefix: str) -> ShardedTensor:
    for name in vector.mcore:
        path, _, attribute = name.rpartition(".")
        module: Any = root
        for step in path.split("."):
            module = getattr(unwrap(module), step, None)
        parameter = getattr(unwrap(module), attribute, None) if module is not None else None
        if parameter is not None:
            return parameter_view(f"{hf_prefix}{vector.hf}", parameter.data, tuple(parameter.shape), None)
    raise ModelError(f"the model has none of {', '.join(vector.mcore)}, which should hold {hf_prefix}{vector.hf}")


def _check_complete(chunk: GPTModel, tensors: list[ShardedTensor]) -> None:
    """Check that the mapping covers every frozen element; any other would silently keep its random value."""
    covered = sum(tensor.read().numel() for tensor in tensors)
    copy = chunk.share_embeddings_and_output_weights and chunk.post_process and not chunk.pre_process
    held = sum(p.numel() for n, p in chunk.named_parameters() if "lora_" not in n)
    held -= chunk.output_layer.weight.numel() if copy else 0
    if covered != held:
        raise ModelError(
            f"the model holds {held} base elements, but the family's mapping covers {covered}; "
            f"layers are mapped from {MCORE_LAYER.format('N')} to {HF_LAYER.format('N')}"
        )
