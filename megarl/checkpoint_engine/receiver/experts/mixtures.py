# SPDX-License-Identifier: Apache-2.0
"""Describe vLLM's mixtures of experts: names and shapes of their weights, buffers of their adapters.

Adapter files hold one pair for each projection of each expert. vLLM takes them by these names, stacks those of a layer,
and keeps them in buffers ``[slots, experts, ...]`` of one module. It lists that module's parts expert by expert: gate,
down, up.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA

from megarl.checkpoint_engine.wire import listed
from megarl.errors import UnsupportedError

PROJECTIONS = ("gate", "down", "up")
# Parameters of a layer's experts, and the kernels that keep them in the checkpoint's layout.
BASE_WEIGHTS = ("w13_weight", "w2_weight")
PLAIN_KERNELS = ("TritonExperts",)

Tensors = list[torch.Tensor | None]


def is_experts(module: Any) -> bool:
    """Return True if a module that vLLM wrapped is a layer's experts."""
    return isinstance(module, FusedMoEWithLoRA)


def experts_of(inner: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield (name, module, Hugging Face names of its parts) for the experts of every layer.

    Args:
        inner: vLLM's LoRA model manager.
    """
    for name, module in inner.modules.items():
        if is_experts(module):
            yield name, module, inner.packed_modules.get(name, [])


def check_engine(inner: Any) -> None:
    """Refuse engines whose experts are in another layout than the tested one.

    Raises:
        UnsupportedError: the engine has expert parallelism, or experts that vLLM takes as one stacked tensor, that
            share matrices, that are held twice, or that have no gate.
    """
    for name, module, parts in experts_of(inner):
        for refused, reason in (
            (module.use_ep, "are spread over an expert-parallel engine (enable_expert_parallel)"),
            (isinstance(module, FusedMoE3DWithLoRA), "are stacked in the model's files"),
            (getattr(module, "enable_moe_shared_loras", False), "share matrices (enable_moe_shared_loras)"),
            (len(parts) != len(PROJECTIONS) * module.local_num_experts, "are held more than once or have no gate"),
        ):
            if refused:
                raise UnsupportedError(
                    f"the experts of '{name}' {reason}; supported is gate, up and down of each expert, once, with "
                    "tensor parallelism at most"
                )


def shapes(module: Any, parts: list[str]) -> dict[str, tuple[int, int]]:
    """Map each part to (input size, output size), unsharded."""
    hidden, inner = module.hidden_size, module.intermediate_size_per_partition * module.tp_size
    sizes = {"gate": (hidden, inner), "down": (inner, hidden), "up": (hidden, inner)}
    return {part: sizes[PROJECTIONS[number % len(PROJECTIONS)]] for number, part in enumerate(parts)}


def check_stackable(inner: Any, ranks: Mapping[str, int]) -> None:
    """Refuse adapters that vLLM cannot stack.

    Args:
        inner: maps adapted modules to their ranks.
        ranks: adapted module -> its rank.

    Raises:
        UnsupportedError: the adapter has only some projections or experts of a layer, or one projection at several
            ranks.
    """
    for name, _, parts in experts_of(inner):
        adapted = [part for part in parts if part in ranks]
        if not adapted:
            continue
        if missing := set(parts) - set(adapted):
            raise UnsupportedError(
                f"the adapter covers a part of the experts '{name}' only (not {listed(missing)}); vLLM takes all "
                "projections of all experts of a layer, or none"
            )
        for first in range(len(PROJECTIONS)):
            values = {ranks[part] for part in parts[first :: len(PROJECTIONS)]}
            if len(values) > 1:
                raise UnsupportedError(
                    f"the {PROJECTIONS[first]} projections of the experts '{name}' have the ranks {sorted(values)}; "
                    "vLLM takes one for all experts of a layer"
                )


def buffers(module: Any, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A and B of one slot from the buffers that the kernels read, in the order of the parts."""
    matrices_of_side = []
    for w13, w2 in (
        (module.w13_lora_a_stacked, module.w2_lora_a_stacked),
        (module.w13_lora_b_stacked, module.w2_lora_b_stacked),
    ):
        (gate, up), (down,) = w13, w2
        experts = zip(gate[slot], down[slot], up[slot], strict=True)
        matrices_of_side.append([matrix for expert in experts for matrix in expert])
    return matrices_of_side[0], matrices_of_side[1]


def shards(module: Any, a: Tensors, b: Tensors) -> tuple[Tensors, Tensors]:
    """Return this rank's part of each matrix, by vLLM's own slicing. ``a`` and ``b`` are in the order of the parts."""
    slices = (
        (module._slice_w13_a, module._slice_w13_b),
        (module._slice_w2_a, module._slice_w2_b),
        (module._slice_w13_a, module._slice_w13_b),
    )
    return _sliced(a, [pair[0] for pair in slices]), _sliced(b, [pair[1] for pair in slices])


def _sliced(matrices: Tensors, slices: list[Callable[[torch.Tensor], torch.Tensor]]) -> Tensors:
    """Slice the matrices as views; vLLM's functions take those of several experts, ``[experts, rows, columns]``."""
    cuts = (slices[number % len(slices)] for number in range(len(matrices)))
    return [None if matrix is None else cut(matrix[None])[0] for matrix, cut in zip(matrices, cuts, strict=True)]


def switch(module: Any, slot: int, adapted: bool) -> None:
    """Make the kernels use a slot exactly if it holds an adapter of the experts."""
    module.adapter_enabled[slot] = int(adapted)


def is_switched(module: Any, slot: int, adapted: bool) -> bool:
    """Return True if the kernels use the slot exactly when it holds an adapter of the experts."""
    return bool(module.adapter_enabled[slot]) == adapted


def base_names(name: str, parts: list[str], plain: bool) -> dict[str, str]:
    """Map the Hugging Face name of each expert's weight to the name by which ``model.load_weights`` takes it.

    Args:
        name: name of the experts' module.
        parts: names of its parts.
        plain: True if vLLM resolves LoRA wrappers itself (0.32).
    """
    inside = name if plain else f"{name}.base_layer"
    return {f"{part}.weight": f"{inside}{part.removeprefix(name)}.weight" for part in parts}


def base_shapes(inner: Any) -> dict[str, tuple[int, int]]:
    """Map the Hugging Face name of each expert's weight to its shape. vLLM pads smaller ones without an error."""
    return {
        f"{part}.weight": (outputs, inputs)
        for _, module, parts in experts_of(inner)
        for part, (inputs, outputs) in shapes(module, parts).items()
    }


def holds_base(layer: Any) -> bool:
    """Return True if a layer of the model holds the base weights of experts."""
    return all(hasattr(layer, weight) for weight in BASE_WEIGHTS)


def keeps_layout(layer: Any) -> bool:
    """Return True if a layer holds experts' weights as the checkpoint has them, and no biases."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    return names == set(BASE_WEIGHTS) and kernel_of(layer).__name__ in PLAIN_KERNELS


def kernel_of(layer: Any) -> type:
    """Return the class of the kernels that compute a layer's experts; that of None before vLLM has made them."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return type(getattr(kernel, "fused_experts", None))


@contextmanager
def loading_base(inner: Any) -> Iterator[None]:
    """Make the experts accept plain names while base weights are loaded.

    With LoRA they expect ``.base_layer.`` inside an expert's name and drop all others without an error. 0.26 also looks
    for its own parameters under such names and fails.

    Raises:
        UnsupportedError: a kernel keeps the weights in a layout of its own, which a reload would not restore.
    """
    wrapped = [module.base_layer.routed_experts for _, module, _ in experts_of(inner)]
    for name, module, _ in experts_of(inner):
        kernel = type(module._moe_kernel.fused_experts).__name__
        if kernel not in PLAIN_KERNELS:
            raise UnsupportedError(
                f"vLLM runs the experts '{name}' with {kernel}; base weights can be sent to {', '.join(PLAIN_KERNELS)} "
                "only; set checkpoint_engine.base_weights=disk"
            )
    before = [experts.lora_base_layer_prefix for experts in wrapped]
    try:
        for experts in wrapped:
            experts.lora_base_layer_prefix = ""
        yield
    finally:
        for experts, prefix in zip(wrapped, before, strict=True):
            experts.lora_base_layer_prefix = prefix
