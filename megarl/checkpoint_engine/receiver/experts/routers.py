# SPDX-License-Identifier: Apache-2.0
"""Make adapters of routers take effect in vLLM's mixtures of experts.

vLLM's experts may call their layer's router themselves. vLLM (0.26, 0.32) then wraps the router with LoRA, wraps the
experts, and sets the wrapped router on the experts' wrapper. The experts inside it silently keep calling the router
without an adapter.
"""

from collections.abc import Iterable
from typing import Any

from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager

from megarl.checkpoint_engine.receiver.experts.mixtures import experts_of, is_experts
from megarl.checkpoint_engine.wire import listed
from megarl.errors import UnsupportedError


def install() -> None:
    """Make vLLM connect routers right after it wraps a model, before it compiles or captures anything."""
    create = LoRAModelManager._create_lora_modules

    def create_and_connect(self: Any) -> None:
        create(self)
        connect_routers(self.modules.values())

    LoRAModelManager._create_lora_modules = create_and_connect


def connect_routers(modules: Iterable[Any]) -> None:
    """Make experts that call their layer's router themselves call the router with the adapter.

    Args:
        modules: the modules that vLLM wrapped.
    """
    modules = list(modules)
    wrappers = {id(module.base_layer): module for module in modules if isinstance(module, BaseLayerWithLoRA)}
    for module in modules:
        if is_experts(module):
            runner = module.base_layer
            runner.gate = wrappers.get(id(runner.gate), runner.gate)


def ignored_routers(inner: Any) -> set[str]:
    """Return the names of wrapped routers whose adapters would be ignored, because the experts call another module."""
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
        UnsupportedError: there are such routers; the message names them.
    """
    if ignored := ignored_routers(inner) & set(adapted):
        raise UnsupportedError(
            f"vLLM calls the routers {listed(ignored)} without their adapters; leave them out of target_modules"
        )
