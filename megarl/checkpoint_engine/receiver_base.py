# SPDX-License-Identifier: Apache-2.0
"""Base weights into a running vLLM model, tensor by tensor, with the proof that every parameter was covered.

vLLM keeps parameters in the kernels' own layout (prepacked on CPU), so weights go through its layerwise reload, which
restores the checkpoint's layout, loads and processes one layer at a time into the same storage. A parameter that no
tensor reaches would keep its old value without an error there; here that raises.
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
    """Replace every base parameter; all adapters are dropped.

    Args:
        runner: vLLM's model runner.
        vllm_config: the worker's config.
        weights: (Hugging Face name, full tensor), read one by one.

    Raises:
        WeightSyncError: a tensor that the model lacks, is not finite or has the wrong shape; a parameter that no
            tensor reached. The model is then half replaced and must not be used.
        UnsupportedError: experts in a layout that a reload would not give.
    """
    model, inner = runner.get_model(), runner.lora_manager._adapter_manager
    names = load_names(model, inner)
    expert_shapes = receiver_moe.base_shapes(inner)
    mapper = rename_mapper(model)
    pending = set(names)

    def checked() -> Iterator[Named]:
        """The tensors under the names that vLLM loads them by; raises ``WeightSyncError`` as ``load_base`` says."""
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
    """Unfused parameter name -> the name by which ``model.load_weights`` takes it.

    vLLM 0.26 has no ``load_weights`` on its LoRA wrappers and wants ``.base_layer.`` in the names of what they wrap.

    Args:
        model: vLLM's.
        inner: its LoRA model manager.
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
    """Name -> layer, of layers with a parameter of their own: the first one where a parameter is tied."""
    seen: set[int] = set()
    owners = {}
    for name, layer in model.named_modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own - seen:
            owners[name] = layer
        seen |= own
    return owners


def _is_untouched(layer: Any) -> bool:
    """Whether vLLM's own count says that nothing, or of experts not everything, was loaded into the layer."""
    info = get_layerwise_info(layer)
    return info.can_load() and (not info.load_numel or receiver_moe.holds_base(layer))


def _repack_tied(model: Any, owners: dict[str, Any]) -> None:
    """Process layers whose parameters are tied to another layer's, which the reload skips.

    On CPU an output layer tied to the embedding multiplies by its own packed copy, which would stay the old one.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        tied = name not in owners and any(True for _ in layer.parameters(recurse=False))
        if tied and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


def _drop_adapters(runner: Any) -> None:
    """Forget all adapters: vLLM 0.32 must (its LoRA state refers to the old base), 0.26 then behaves alike."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.lora_manager.remove_all_adapters()
