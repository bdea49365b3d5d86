# SPDX-License-Identifier: Apache-2.0
"""Load base weights into a running vLLM model, tensor by tensor, and check that every parameter was covered.

vLLM keeps parameters in the kernels' own layout (prepacked on CPU). Weights therefore go through its layerwise reload,
which restores the checkpoint's layout, and loads and processes one layer at a time into the same storage. vLLM's reload
silently keeps the old value of a parameter that no tensor reaches; here that raises.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megarl.checkpoint_engine import receiver_moe
from megarl.checkpoint_engine.receiver_lora import rename_mapper
from megarl.checkpoint_engine.stream import is_finite
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]


def load_base(runner: Any, vllm_config: Any, weights: Iterable[Named]) -> None:
    """Replace every base parameter. All adapters are dropped.

    Args:
        runner: vLLM's model runner.
        vllm_config: the worker's config.
        weights: (Hugging Face name, full tensor) pairs, read one by one.

    Raises:
        WeightSyncError: the model lacks a tensor, a tensor is not finite or has a wrong shape, or no tensor reached a
            parameter. The model is then partly replaced and must not be used.
        UnsupportedError: the experts are in a layout that a reload would not restore.
    """
    model, inner = runner.get_model(), runner.lora_manager._adapter_manager
    names = load_names(model, inner)
    expert_shapes = receiver_moe.base_shapes(inner)
    mapper = rename_mapper(model)
    pending = set(names)

    def checked() -> Iterator[Named]:
        """Yield the tensors under the names by which vLLM loads them. Raises as ``load_base`` does."""
        for name, tensor in weights:
            mapped = mapper._map_name(name) if mapper is not None else name
            if mapped not in pending:
                raise WeightSyncError(f"tensor '{name}' came twice or is no parameter of the model")
            if not is_finite(tensor):
                raise WeightSyncError(f"tensor '{name}' holds a value that is not finite")
            if (shape := tuple(tensor.shape)) != expert_shapes.get(mapped, shape):
                raise WeightSyncError(f"tensor '{name}' has shape {shape}, the model needs {expert_shapes[mapped]}")
            pending.discard(mapped)
            yield (name if mapped == names[mapped] else names[mapped]), tensor

    with set_current_vllm_config(vllm_config), torch.device(runner.device), receiver_moe.loading_base(inner):
        owners = _owners(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights(checked())
        except (AssertionError, ValueError, RuntimeError) as error:
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"vLLM refused a base tensor (wrong shape?): {error!r}") from error
        untouched = [name for name, layer in owners.items() if _is_untouched(layer)]
        finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied(model, owners)
    if pending:
        raise WeightSyncError(f"parameters that no tensor reached: {listed(pending)}")
    if untouched:
        raise WeightSyncError(f"layers that vLLM's reload did not fill: {listed(untouched)}")
    _drop_adapters(runner)


def load_names(model: Any, inner: Any) -> dict[str, str]:
    """Map each unfused parameter's name to the name by which ``model.load_weights`` takes it.

    vLLM 0.26 has no ``load_weights`` on its LoRA wrappers and needs ``.base_layer.`` in the names of wrapped modules.

    Args:
        model: vLLM's model.
        inner: vLLM's LoRA model manager.
    """
    plain = hasattr(BaseLayerWithLoRA, "load_weights")
    packed = getattr(model, "packed_modules_mapping", {})
    names: dict[str, str] = {}
    stacked: set[str] = set()
    for experts, _, parts in receiver_moe.experts_of(inner):
        names |= receiver_moe.base_names(experts, parts, plain)
        stacked |= {f"{experts}.base_layer.routed_experts.{weight}" for weight in receiver_moe.BASE_WEIGHTS}
    for parameter, _ in model.named_parameters():
        if parameter in stacked:
            continue
        name = parameter.replace(".base_layer.", ".")
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        for part in packed.get(last, [last]):
            unfused = f"{parent}.{part}" if parent else part
            wrapped = parameter != name and not plain
            names[f"{unfused}.{leaf}"] = f"{unfused}.base_layer.{leaf}" if wrapped else f"{unfused}.{leaf}"
    return names


def _owners(model: Any) -> dict[str, Any]:
    """Map names to layers with parameters of their own. A tied parameter belongs to the first layer that has it."""
    seen: set[int] = set()
    owners = {}
    for name, layer in model.named_modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if parameters - seen:
            owners[name] = layer
        seen |= parameters
    return owners


def _is_untouched(layer: Any) -> bool:
    """Return True if, by vLLM's count, nothing was loaded into the layer, or not everything of a layer of experts."""
    info = get_layerwise_info(layer)
    return info.can_load() and (not info.load_numel or receiver_moe.holds_base(layer))


def _repack_tied(model: Any, owners: dict[str, Any]) -> None:
    """Process layers whose parameters are tied to another layer's, which the reload skips.

    On a CPU an output layer tied to the embedding uses a packed copy of its own, which would keep the old values.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        tied = name not in owners and any(True for _ in layer.parameters(recurse=False))
        if tied and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


def _drop_adapters(runner: Any) -> None:
    """Drop all adapters. vLLM 0.32 requires it (its LoRA state refers to the old base); 0.26 must behave alike."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.lora_manager.remove_all_adapters()
