# SPDX-License-Identifier: Apache-2.0
"""Convert a received PEFT adapter to vLLM's LoRA weights: names, shapes, scaling. Verify that they are in place.

vLLM 0.26's ``PEFTHelper`` has one rank and one alpha. Each module's scaling (PEFT's: ``alpha / r``, or ``alpha /
sqrt(r)`` with rsLoRA, Kalajdzievski 2023) is therefore multiplied into its B once, in float32, and vLLM is given alpha
= rank, so that its own scaling is 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from megarl.checkpoint_engine import receiver_moe, receiver_router, receiver_stacked
from megarl.checkpoint_engine.stream import is_finite
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError
from megarl.peft.names import EMBEDDING, OUTPUT, PREFIX
from megarl.peft.rules import rank_and_scaling, read_config

SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
# Modules that vLLM adapts in another layout (lora_embedding_A, logits) than the linear one tested here.
NOT_LINEAR = (EMBEDDING, OUTPUT)


@dataclass(frozen=True)
class Pair:
    """One module's matrices in vLLM's LoRA dtype: ``a`` [rank, in]; ``b`` [out, rank], times the scaling."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class StagedAdapter:
    """A checked adapter: maps each module's Hugging Face name to its pair."""

    pairs: dict[str, Pair]
    rank: int


def stage_adapter(manager: Any, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> StagedAdapter:
    """Check an adapter against the model, and multiply its scaling into B.

    Args:
        manager: vLLM's worker LoRA manager.
        tensors: maps PEFT's on-disk names to full tensors on the CPU.
        config: PEFT's ``adapter_config.json``.

    Raises:
        WeightSyncError: no module takes a tensor, a target or half of a pair is missing, or a tensor has a wrong shape
            or rank or is not finite.
        AdapterError, UnsupportedError: see ``megarl.peft.rules.read_config``. Also if the adapter covers a part of the
            experts, or a router that vLLM would ignore.
    """
    peft_config = read_config(config)
    inner, shapes = manager._adapter_manager, linear_shapes(manager)
    halves, keys, absent = _split(tensors), dict[str, str](), dict[str, tuple[int, int]]()
    if peft_config.target_parameters:
        halves, keys, absent = receiver_stacked.unstack(inner, halves, shapes, peft_config)
    _check_targets(halves, shapes, peft_config, keys)
    ranks = {module: rank_and_scaling(peft_config, keys.get(module, module))[0] for module in halves}
    receiver_moe.check_stackable(inner, ranks | dict.fromkeys(absent, 1))
    receiver_router.check_routers(inner, halves)
    dtype, limit = manager.lora_config.lora_dtype, manager.lora_config.max_lora_rank
    pairs = {
        module: Pair(torch.zeros(1, inputs, dtype=dtype), torch.zeros(outputs, 1, dtype=dtype))
        for module, (inputs, outputs) in absent.items()
    }
    for module, (a, b) in halves.items():
        rank, scaling = rank_and_scaling(peft_config, keys.get(module, module))
        if rank > limit:
            raise WeightSyncError(f"'{module}' has rank {rank}, above the engine's max_lora_rank {limit}")
        inputs, outputs = shapes[module]
        for name, tensor, shape in (("lora_A", a, (rank, inputs)), ("lora_B", b, (outputs, rank))):
            if tuple(tensor.shape) != shape:
                raise WeightSyncError(f"'{module}.{name}' has shape {tuple(tensor.shape)}, the model needs {shape}")
            if not is_finite(tensor):
                raise WeightSyncError(f"'{module}.{name}' holds a value that is not finite")
        pairs[module] = Pair(a.to(dtype).contiguous(), (b.float() * scaling).to(dtype).contiguous())
    return StagedAdapter(pairs, max(pair.a.shape[0] for pair in pairs.values()))


def build_lora_model(manager: Any, staged: StagedAdapter, lora_id: int) -> LoRAModel:
    """Return a staged adapter in vLLM's form. The staged tensors are not changed."""
    tensors = {}
    for module, pair in staged.pairs.items():
        tensors[PREFIX + module + SUFFIXES["a"]] = pair.a.clone()
        tensors[PREFIX + module + SUFFIXES["b"]] = pair.b.clone()
    helper = PEFTHelper.from_dict({"r": staged.rank, "lora_alpha": staged.rank, "target_modules": []})
    helper.validate_legal(manager.lora_config)
    model = manager._adapter_manager.model
    return LoRAModel.from_lora_tensors(
        lora_id,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=rename_mapper(model),
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )


def adapter_differences(manager: Any, staged: StagedAdapter, lora_id: int) -> list[str]:
    """Compare the buffers that vLLM's kernels read with the staged adapter, bit for bit.

    Every wrapped module is compared; those without a pair must hold zeros. This finds what vLLM drops without an error.

    Returns:
        Names of the modules that differ.
    """
    inner = manager._adapter_manager
    if lora_id not in inner.lora_index_to_id:
        return [f"LoRA id {lora_id} has no slot"]
    slot = inner.lora_index_to_id.index(lora_id)
    different = []
    for module, parts in _wrapped(inner):
        pairs = [staged.pairs.get(part) for part in parts]
        a, b = [pair and pair.a for pair in pairs], [pair and pair.b for pair in pairs]
        if getattr(module, "tp_size", 1) > 1:
            a, b = _shards(module, a, b)
        buffers_a, buffers_b = _buffers(module, slot)
        for part, buffer, expected in (*zip(parts, buffers_a, a, strict=True), *zip(parts, buffers_b, b, strict=True)):
            if not _holds(buffer, expected) and part not in different:
                different.append(part)
        if receiver_moe.is_experts(module) and not receiver_moe.is_switched(module, slot, any(pairs)):
            different.append(parts[0])
    return different


def linear_shapes(manager: Any) -> dict[str, tuple[int, int]]:
    """Map every linear module that vLLM can adapt to (input size, output size), unsharded, by Hugging Face name."""
    shapes: dict[str, tuple[int, int]] = {}
    for module, parts in _wrapped(manager._adapter_manager):
        if receiver_moe.is_experts(module):
            shapes |= receiver_moe.shapes(module, parts)
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


def _wrapped(inner: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield (vLLM's wrapped linear or experts, Hugging Face names of its parts in order)."""
    for name, module in inner.modules.items():
        linear = name.rpartition(".")[2] not in NOT_LINEAR and hasattr(module.base_layer, "input_size")
        if linear or receiver_moe.is_experts(module):
            yield module, inner.packed_modules.get(name, [name])


def _buffers(module: Any, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A and B of one slot from the buffers that the kernels read, in the order of the parts."""
    if receiver_moe.is_experts(module):
        return receiver_moe.buffers(module, slot)
    return [stacked[slot, 0] for stacked in module.lora_a_stacked], [
        stacked[slot, 0] for stacked in module.lora_b_stacked
    ]


def output_sizes(layer: Any, slices: int) -> list[int]:
    """Return the unsharded output size of each slice of a (fused) vLLM linear layer."""
    if hasattr(layer, "total_num_kv_heads"):
        # output_sizes of a QKV layer counts replicated KV heads once per rank.
        value_size = getattr(layer, "v_head_size", layer.head_size)
        kv_heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, kv_heads * layer.head_size, kv_heads * value_size]
    return [layer.output_size] if slices == 1 else list(layer.output_sizes)


def _shards(module: Any, a: list[Any], b: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return this rank's part of each matrix, by vLLM's own slicing."""
    if receiver_moe.is_experts(module):
        return receiver_moe.shards(module, a, b)
    if len(a) > 1:
        return module.slice_lora_a(a), module.slice_lora_b(b)
    return [x if x is None else module.slice_lora_a(x) for x in a], [
        x if x is None else module.slice_lora_b(x) for x in b
    ]


def _holds(buffer: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Return True if a padded buffer holds exactly ``expected`` (None: nothing), and zeros around it."""
    if expected is None:
        return not buffer.any()
    rows, columns = expected.shape
    inside = buffer[:rows, :columns]
    return (
        torch.equal(inside, expected.to(buffer.device, buffer.dtype))
        and not buffer[rows:].any()
        and not buffer[:rows, columns:].any()
    )
