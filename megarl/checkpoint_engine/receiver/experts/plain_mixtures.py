# SPDX-License-Identifier: Apache-2.0
"""Describe mixtures of experts in a vLLM without LoRA: names and shapes of weights, kernels that can reload them.

Such an engine chooses the experts' kernel by device, where LoRA always has Triton's (``mixtures``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.checkpoint_engine.receiver.experts.mixtures import PLAIN_KERNELS, holds_base, kernel_of
from megarl.errors import UnsupportedError

# Class of the kernels that keep a packed copy, on CPUs. vLLM (0.32) packs when it makes the kernel, never again.
PACKING_KERNEL = "CPUUnquantizedExperts"
SUFFIX = ".routed_experts"


def experts_of(model: torch.nn.Module) -> Iterator[tuple[str, Any, dict[str, tuple[int, int]]]]:
    """Yield (name, ``RoutedExperts``, parts) for the experts of every layer.

    A part is a projection of an expert: Hugging Face name -> shape (output size, input size), unsharded.
    """
    for path, layer in model.named_modules():
        if not holds_base(layer):
            continue
        name, config = path.removesuffix(SUFFIX), layer.moe_config
        hidden, inner = config.hidden_dim_unpadded, config.intermediate_size
        shapes = {
            layer.ckpt_gate_proj_name: (inner, hidden),
            layer.ckpt_down_proj_name: (hidden, inner),
            layer.ckpt_up_proj_name: (inner, hidden),
        }
        experts = range(layer.global_num_experts)
        yield path, layer, {f"{name}.{e}.{leaf}.weight": shape for e in experts for leaf, shape in shapes.items()}


def check_engine(model: torch.nn.Module) -> None:
    """Refuse engines whose experts a reload would not restore.

    Raises:
        UnsupportedError: the engine has expert parallelism, or a kernel that keeps the weights in a layout of its own.
    """
    for name, layer, _ in experts_of(model):
        if layer.use_ep:
            raise UnsupportedError(
                f"the experts of '{name}' are spread over an expert-parallel engine (enable_expert_parallel); "
                "supported is tensor parallelism"
            )
        if not (_packs(layer) or kernel_of(layer).__name__ in PLAIN_KERNELS):
            raise UnsupportedError(
                f"vLLM runs the experts '{name}' with {kernel_of(layer).__name__}; merged weights can be sent to "
                f"{', '.join(PLAIN_KERNELS)} only; set sampler.engine_args={{moe_backend: triton}} or "
                "checkpoint_engine.content=adapter"
            )


@contextmanager
def loading(model: torch.nn.Module) -> Iterator[None]:
    """Make kernels that keep packed weights pack the new ones: without a kernel, vLLM makes one and packs for it."""
    check_engine(model)
    before = [(layer.quant_method, layer.quant_method.moe_kernel) for _, layer, _ in experts_of(model) if _packs(layer)]
    try:
        for method, _ in before:
            method.moe_kernel = None
        yield
    finally:
        for method, kernel in before:
            method.moe_kernel = method.moe_kernel or kernel


def _packs(layer: Any) -> bool:
    return PACKING_KERNEL in (base.__name__ for base in kernel_of(layer).__mro__)
