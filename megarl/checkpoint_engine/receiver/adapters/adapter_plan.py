# SPDX-License-Identifier: Apache-2.0
"""Plan how a PEFT adapter goes into vLLM's LoRA buffers: names, shapes, scaling, this worker's part of each matrix.

A plan is made once per adapter config, on tensors without values (``meta``), by the same renaming, unstacking and
slicing that values would need. What comes out of that is, for each buffer, the place of its matrix in the received
bytes. vLLM 0.26's ``PEFTHelper`` has one rank and one alpha; so each module's scaling (PEFT's: ``alpha / r``, or
``alpha / sqrt(r)`` with rsLoRA, Kalajdzievski 2023) is multiplied into its B, in float32, and vLLM's own is 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from megarl.checkpoint_engine.buckets.filling import DTYPES
from megarl.checkpoint_engine.receiver.experts import mixtures, routers, stacked_experts
from megarl.checkpoint_engine.receiver.fused import cut_rows, fuse_shapes, fused_parts
from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.wire import Plan, listed
from megarl.errors import UnsupportedError, WeightSyncError
from megarl.peft.names import PREFIX
from megarl.peft.rules import rank_and_scaling, read_config

SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
# Bytes between the buckets' first bytes in the address space of a plan: more than any bucket has.
SPACE = 2**44


class Job(NamedTuple):
    """Fill one of vLLM's buffers.

    Attributes:
        name: the module's Hugging Face name and the side, for messages (``"...q_proj.lora_A"``).
        buffer: index of the buffer in ``buffers_of``.
        source: the matrix; None fills the buffer with zeros.
        scaling: what the matrix is multiplied by.
    """

    name: str
    buffer: int
    source: Source | None
    scaling: float


@dataclass(frozen=True)
class SlotPlan:
    """The jobs that fill a slot with one adapter, one per buffer; for each layer of experts whether it is adapted."""

    jobs: tuple[Job, ...]
    experts: tuple[tuple[Any, bool], ...]

    def writes(self, bucket: int, buffers: list[torch.Tensor]) -> list[Write]:
        """Return the writes that a bucket allows; with the first one, those without a matrix.

        Args:
            bucket: its index.
            buffers: of the slot, from ``buffers_of``.
        """
        first = bucket == 0
        return [
            Write(job.name, buffers[job.buffer], job.source, job.scaling)
            for job in self.jobs
            if (first if job.source is None else job.source.bucket == bucket)
        ]


class Pair(NamedTuple):
    """One module's matrices: ``a`` [rank, in]; ``b`` [out, rank], which is multiplied by ``scaling``."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def plan_slot(manager: Any, plan: Plan) -> SlotPlan:
    """Check an adapter against the model, and find the place of each buffer's matrix.

    Args:
        manager: vLLM's worker LoRA manager.
        plan: what the transfer consists of.

    Raises:
        WeightSyncError: no module takes a tensor, a target or half of a pair is missing, or a tensor has a wrong shape
            or rank.
        AdapterError, UnsupportedError: see ``megarl.peft.rules.read_config``. Also if the adapter covers a part of the
            experts, or a router that vLLM would ignore.
    """
    inner = manager._adapter_manager
    # An address is bucket * SPACE + offset. Every matrix is a view into it, however it was cut.
    space = torch.empty((max(place.bucket for place in plan.places) + 1) * SPACE, dtype=torch.uint8, device="meta")
    tensors = {}
    for place in plan.places:
        begin = place.bucket * SPACE + place.offset
        tensors[place.name] = space[begin : begin + place.nbytes].view(DTYPES[place.dtype]).view(place.shape)
    pairs = _pairs(manager, tensors, read_config(plan.adapter_config))
    jobs: list[Job] = []
    experts = []
    for module, parts in wrapped_modules(inner):
        held = [pairs.get(part) for part in parts]
        a, b = [pair and pair.a for pair in held], [pair and pair.b for pair in held]
        if getattr(module, "tp_size", 1) > 1:
            a, b = _shards(module, a, b)
        for side, matrices in (("A", a), ("B", b)):
            for part, pair, matrix in zip(parts, held, matrices, strict=True):
                scaling = pair.scaling if pair and side == "B" else 1.0
                name = f"{part}.lora_{side}"
                jobs.append(Job(name, len(jobs), _source(name, matrix, space), scaling))
        if mixtures.is_experts(module):
            experts.append((module, any(pair is not None for pair in held)))
    return SlotPlan(tuple(jobs), tuple(experts))


def buffers_of(manager: Any, slot: int) -> list[torch.Tensor]:
    """Return the buffers of one slot that the kernels read, each ``[R, C]``, in the order of a plan's jobs."""
    buffers = []
    for module, _ in wrapped_modules(manager._adapter_manager):
        for side in _buffers(module, slot):
            buffers += side
    return buffers


def _source(name: str, matrix: torch.Tensor | None, space: torch.Tensor) -> Source | None:
    """Return where a matrix without values is."""
    if matrix is None:
        return None
    if matrix.untyped_storage()._cdata != space.untyped_storage()._cdata:
        raise UnsupportedError(f"vLLM does not cut '{name}' out of the adapter but copies it; supported are plain cuts")
    bucket, begin = divmod(matrix.storage_offset() * matrix.itemsize, SPACE)
    return Source(bucket, matrix.dtype, begin // matrix.itemsize, tuple(matrix.shape), tuple(matrix.stride()))


def _pairs(manager: Any, tensors: dict[str, torch.Tensor], config: LoraConfig) -> dict[str, Pair]:
    """Map each adapted module to its pair; raises as ``plan_slot``."""
    inner, halves = manager._adapter_manager, _split(tensors)
    keys, absent = dict[str, str](), dict[str, tuple[int, int]]()
    # vLLM may name a module otherwise than the model's files do.
    inside = {name: module_name(inner.model, name) for name in halves}
    in_files = {own: name for name, own in inside.items()}
    linears = {in_files.get(own, own): shape for own, shape in linear_shapes(manager).items()}
    fused = fused_parts(inner, halves)
    shapes = fuse_shapes(linears, fused)
    if config.target_parameters:
        halves, keys, absent = stacked_experts.unstack(inner, halves, shapes, config)
    _check_targets(halves, shapes, config, keys)
    ranks = {module: rank_and_scaling(config, keys.get(module, module)) for module in halves}
    # vLLM needs all projections of a layer's experts or none; those that the adapter lacks get zeros.
    expert_ranks = {module: rank for module, (rank, _) in ranks.items()} | dict.fromkeys(absent, 1)
    mixtures.check_stackable(inner, expert_ranks)
    routers.check_routers(inner, halves)
    limit = manager.lora_config.max_lora_rank
    pairs = {}
    for module, (a, b) in halves.items():
        rank, scaling = ranks[module]
        if rank > limit:
            raise WeightSyncError(f"'{module}' has rank {rank}, above the engine's max_lora_rank {limit}")
        inputs, outputs = shapes[module]
        for name, tensor, shape in (("lora_A", a, (rank, inputs)), ("lora_B", b, (outputs, rank))):
            if tuple(tensor.shape) != shape:
                raise WeightSyncError(f"'{module}.{name}' has shape {tuple(tensor.shape)}, the model needs {shape}")
        parts = fused.get(module, [module])
        sizes = [linears[part][1] for part in parts] if module in fused else [outputs]
        for part, rows in zip(parts, cut_rows(b, sizes), strict=True):
            pairs[inside.get(part, part)] = Pair(a, rows, scaling)
    return pairs


def linear_shapes(manager: Any) -> dict[str, tuple[int, int]]:
    """Map every linear module that vLLM can adapt to (input size, output size), unsharded, by Hugging Face name."""
    shapes: dict[str, tuple[int, int]] = {}
    for module, parts in wrapped_modules(manager._adapter_manager):
        if mixtures.is_experts(module):
            shapes |= mixtures.shapes(module, parts)
        else:
            outputs = output_sizes(module.base_layer, len(parts))
            shapes |= {part: (module.base_layer.input_size, size) for part, size in zip(parts, outputs, strict=True)}
    return shapes


def rename_mapper(model: Any) -> Any:
    """Return vLLM's renaming of Hugging Face names without stacking, or None (0.32 and 0.26 name it differently)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def module_name(model: Any, name: str) -> str:
    """Return vLLM's name of a module that Hugging Face's files call ``name``."""
    mapper = rename_mapper(model)
    renamed = mapper._map_name(f"{name}.weight") if mapper is not None else None
    return renamed.removesuffix(".weight") if renamed else name


def _split(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Map modules to (A, B). Every tensor must be one half of a complete pair."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        half = next((half for half, suffix in SUFFIXES.items() if name.endswith(suffix)), None)
        if half is None or not name.startswith(PREFIX):
            raise WeightSyncError(f"tensor '{name}' is not named '{PREFIX}<module>.lora_A.weight' (or lora_B)")
        halves.setdefault(name.removeprefix(PREFIX).removesuffix(SUFFIXES[half]), {})[half] = tensor
    for module, pair in halves.items():
        if len(pair) != len(SUFFIXES):
            missing = next(suffix for half, suffix in SUFFIXES.items() if half not in pair)
            raise WeightSyncError(f"tensor '{PREFIX}{module}{missing}' is missing; its other half came")
    return {module: (pair["a"], pair["b"]) for module, pair in halves.items()}


def _check_targets(
    halves: Any, shapes: dict[str, tuple[int, int]], config: LoraConfig, parameters: dict[str, str]
) -> None:
    """Refuse tensors that are not exactly those of the config's targets in this model.

    ``parameters`` are modules that the config targets as parameters.
    """
    unknown = halves.keys() - shapes.keys()
    if unknown:
        raise WeightSyncError(f"no linear module of the model takes the adapter of {listed(unknown)}")
    if config.target_modules in ("all-linear", None) and not parameters:
        targeted = set(shapes)
    else:
        chosen = shapes if config.target_modules else ()
        targeted = {module for module in chosen if check_target_module_exists(config, module)} | parameters.keys()
    if missing := targeted - halves.keys():
        raise WeightSyncError(f"adapter_config covers {listed(missing)}, but no tensor of it came")
    if extra := halves.keys() - targeted:
        raise WeightSyncError(f"tensors came for {listed(extra)}, which adapter_config does not cover")


def wrapped_modules(inner: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield (vLLM's wrapped linear or experts, Hugging Face names of its parts in order)."""
    for name, module in inner.modules.items():
        if hasattr(module.base_layer, "input_size") or mixtures.is_experts(module):
            yield module, inner.packed_modules.get(name, [name])


def _buffers(module: Any, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A and B of one slot from the buffers that the kernels read, in the order of the parts."""
    if mixtures.is_experts(module):
        return mixtures.buffers(module, slot)
    return [stacked[slot, 0] for stacked in module.lora_a_stacked], [
        stacked[slot, 0] for stacked in module.lora_b_stacked
    ]


def output_sizes(layer: Any, slices: int) -> list[int]:
    """Return the unsharded output size of each slice of a (fused) vLLM linear layer."""
    if hasattr(layer, "total_num_kv_heads"):
        # output_sizes of a QKV layer counts replicated KV heads once per rank.
        value_size = getattr(layer, "v_head_size", layer.head_size)
        kv_heads = layer.total_num_kv_heads
        sizes = [layer.total_num_heads * layer.head_size, kv_heads * layer.head_size, kv_heads * value_size]
        return [sum(sizes)] if slices == 1 else sizes
    return [layer.output_size] if slices == 1 else list(layer.output_sizes)


def _shards(module: Any, a: list[Any], b: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return this rank's part of each matrix, by vLLM's own slicing."""
    if mixtures.is_experts(module):
        return mixtures.shards(module, a, b)
    if len(a) > 1:
        return module.slice_lora_a(a), module.slice_lora_b(b)
    return [x if x is None else module.slice_lora_a(x) for x in a], [
        x if x is None else module.slice_lora_b(x) for x in b
    ]
