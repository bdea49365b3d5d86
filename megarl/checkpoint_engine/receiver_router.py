# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts in vLLM: that their adapters count.

vLLM's experts may call their layer's router themselves. vLLM (0.26, 0.32) then wraps the router with LoRA, wraps the
experts, and sets the wrapped router on the experts' wrapper; the experts below it keep calling the router without an
adapter, and say nothing.
"""

from collections.abc import Iterable
from typing import Any

from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from megarl.checkpoint_engine.receiver_moe import experts_of, is_experts
from megarl.checkpoint_engine.wire import listed
from megarl.errors import UnsupportedError


def install() -> None:
    """Make vLLM connect routers as soon as it has wrapped a model: before it compiles or captures anything."""
    create = LoRAModelManager._create_lora_modules

    def create_and_connect(self: Any) -> None:
        create(self)
        connect_routers(self.modules.values())

    LoRAModelManager._create_lora_modules = create_and_connect


def connect_routers(modules: Iterable[Any]) -> None:
    """Where a layer's experts call the router themselves, make them call the one with the adapter.

    Args:
        modules: what vLLM wrapped.
    """
    modules = list(modules)
    wrappers = {id(module.base_layer): module for module in modules if isinstance(module, BaseLayerWithLoRA)}
    for module in modules:
        if is_experts(module):
            runner = module.base_layer
            runner.gate = wrappers.get(id(runner.gate), runner.gate)


def ignored_routers(inner: Any) -> set[str]:
    """Names of wrapped routers whose adapters would not count: the experts call another module in their place."""
    called = [module.base_layer for _, module, _ in experts_of(inner)]
    bypassed = {
        id(getattr(runner.gate, "base_layer", runner.gate))
        for runner in called
        if runner.gate is not None
        and (not isinstance(runner.gate, BaseLayerWithLoRA) or getattr(runner, "_fse_fuse_gate", False))
    }
    return {name for name, module in inner.modules.items() if id(module.base_layer) in bypassed}


def check_routers(inner: Any, adapted: Iterable[str]) -> None:
    """Refuse adapters of routers that this vLLM would ignore.

    Raises:
        UnsupportedError: naming them.
    """
    if ignored := ignored_routers(inner) & set(adapted):
        raise UnsupportedError(
            f"vLLM calls the routers {listed(ignored)} without their adapters; leave them out of target_modules"
        )
