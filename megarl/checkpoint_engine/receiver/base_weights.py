# SPDX-License-Identifier: Apache-2.0
"""Load base or merged weights into a running vLLM model, tensor by tensor, and check that all are covered.

vLLM keeps parameters in the kernels' own layout (prepacked on CPU). Weights therefore go through its layerwise reload,
which restores the checkpoint's layout, and loads and processes one layer at a time into the same storage. vLLM's reload
silently keeps the old value of a parameter that no tensor reaches; here that raises.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megarl.checkpoint_engine.receiver import mixtures, plain_mixtures
from megarl.checkpoint_engine.receiver.adapter_plan import output_sizes, rename_mapper
from megarl.checkpoint_engine.receiver.fused import fused_name
from megarl.checkpoint_engine.stream import is_finite
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]


class Target(NamedTuple):
    """The destination of a tensor: its name for ``model.load_weights``, and the module that holds it."""

    load: str
    layer: str


class Layout(NamedTuple):
    """The destinations of all weights of a model.

    Attributes:
        targets: each tensor's Hugging Face name, as vLLM renames it -> its target.
        shapes: shapes of linears' and experts' weights by the same names. vLLM pads or cuts some others silently.
        fused: the target of a tensor of all parts of a linear, by its name -> the parts' names. It may come instead of
            them.
        loading: context in which the model loads.
    """

    targets: dict[str, Target]
    shapes: dict[str, tuple[int, int]]
    fused: dict[str, tuple[Target, list[str]]]
    loading: AbstractContextManager

    def of(self, name: str) -> tuple[Target | None, list[str]]:
        """Return a tensor's target, None if it has none, and the names that it covers."""
        if name in self.targets:
            return self.targets[name], [name]
        return self.fused.get(name, (None, []))


def load_weights(runner: Any, vllm_config: Any, weights: Iterable[Named], *, whole: bool) -> None:
    """Replace parameters of the model. All adapters are dropped.

    Args:
        runner: vLLM's model runner.
        vllm_config: the worker's config.
        weights: (Hugging Face name, full tensor) pairs, read one by one.
        whole: True requires every tensor of the model; False the tensors of whole layers of vLLM, where q, k and v are
            one layer, gate and up, and all experts of a block. The other layers keep their values.

    Raises:
        WeightSyncError: the model lacks a tensor, a tensor is not finite or has a wrong shape, or no tensor reached a
            parameter. The model is then partly replaced and must not be used.
        UnsupportedError: the experts are in a layout that a reload would not restore.
    """
    model = runner.get_model()
    layout = layout_of(model, getattr(runner, "lora_manager", None))
    targets = layout.targets
    mapper = rename_mapper(model)
    pending = set(targets)

    def checked() -> Iterator[Named]:
        """Yield the tensors under the names by which vLLM loads them. Raises as ``load_weights`` does."""
        for name, tensor in weights:
            mapped = mapper._map_name(name) if mapper is not None else name
            target, parts = layout.of(mapped)
            if target is None or not pending.issuperset(parts):
                raise WeightSyncError(
                    f"tensor '{name}' came twice or is no parameter of the model; if it is a tensor of the model's "
                    "files, vLLM takes it only from there: set checkpoint_engine.base_weights=disk"
                )
            if not is_finite(tensor):
                raise WeightSyncError(f"tensor '{name}' holds a value that is not finite")
            if (shape := tuple(tensor.shape)) != layout.shapes.get(mapped, shape):
                raise WeightSyncError(f"tensor '{name}' has shape {shape}, the model needs {layout.shapes[mapped]}")
            pending.difference_update(parts)
            # The model renames Hugging Face's names itself; only a name inside a LoRA wrapper is not one of them.
            yield (name if mapped == target.load else target.load), tensor

    with set_current_vllm_config(vllm_config), torch.device(runner.device), layout.loading, _quiet(not whole):
        owners = _owners(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights(checked())
        except Exception as error:
            # Take the model out of the reload, so that a complete base can still be loaded.
            with suppress(Exception):
                finalize_layerwise_reload(model, vllm_config.model_config)
            if isinstance(error, WeightSyncError) or not isinstance(error, AssertionError | ValueError | RuntimeError):
                raise
            raise WeightSyncError(f"vLLM refused a tensor (wrong shape?): {error!r}") from error
        came = owners if whole else {targets[name].layer for name in targets.keys() - pending}
        untouched = [name for name, layer in owners.items() if name in came and _is_untouched(layer)]
        finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied(model, owners)
    pending = {name for name in pending if whole or targets[name].layer in came}
    if pending:
        raise WeightSyncError(f"parameters that no tensor reached: {listed(pending)}")
    if untouched:
        raise WeightSyncError(f"layers that vLLM's reload did not fill: {listed(untouched)}")
    _drop_adapters(runner)


def layout_of(model: Any, manager: Any) -> Layout:
    """Return how a model takes weights, with or without LoRA.

    vLLM 0.26 has no ``load_weights`` on its LoRA wrappers and needs ``.base_layer.`` in the names of wrapped modules.

    Args:
        model: vLLM's model.
        manager: vLLM's worker LoRA manager; None in an engine without LoRA.
    """
    plain = hasattr(BaseLayerWithLoRA, "load_weights")
    layout = _experts_layout(model, manager, plain)
    stacked = {f"{target.layer}.{weight}" for target in layout.targets.values() for weight in mixtures.BASE_WEIGHTS}
    for parameter, _ in model.named_parameters():
        if parameter in stacked:
            continue
        layer, _, leaf = parameter.rpartition(".")
        below = ".base_layer" if ".base_layer." in parameter and not plain else ""
        parts = _unfused(model, layer)
        for name, shape in parts.items():
            layout.targets[f"{name}.{leaf}"] = Target(f"{name}{below}.{leaf}", layer)
            if leaf == "weight" and shape:
                layout.shapes[f"{name}.{leaf}"] = shape
        if whole := fused_name(layer.removesuffix(".base_layer"), list(parts)):
            names = [f"{name}.{leaf}" for name in parts]
            layout.fused[f"{whole}.{leaf}"] = Target(f"{whole}{below}.{leaf}", layer), names
            if leaf == "weight" and all(name in layout.shapes for name in names):
                layout.shapes[f"{whole}.{leaf}"] = _sum_rows(layout.shapes[name] for name in names)
    return layout


def _sum_rows(shapes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the shape of matrices below one another."""
    rows, columns = zip(*shapes, strict=True)
    return sum(rows), columns[0]


def _experts_layout(model: Any, manager: Any, plain: bool) -> Layout:
    """Return the experts' part of a layout. ``plain`` as in ``layout_of``: LoRA wrappers take plain names."""
    targets: dict[str, Target] = {}
    if manager is None:
        shapes: dict[str, tuple[int, int]] = {}
        for layer, _, parts in plain_mixtures.experts_of(model):
            targets |= {part: Target(part, layer) for part in parts}
            shapes |= parts
        return Layout(targets, shapes, {}, plain_mixtures.loading(model))
    inner = manager._adapter_manager
    for name, _, names in mixtures.experts_of(inner):
        layer = f"{name}.base_layer{plain_mixtures.SUFFIX}"
        targets |= {part: Target(load, layer) for part, load in mixtures.base_names(name, names, plain).items()}
    return Layout(targets, mixtures.base_shapes(inner), {}, mixtures.loading_base(inner))


def _unfused(model: Any, layer: str) -> dict[str, tuple[int, int] | None]:
    """Map the Hugging Face name of each part of a layer to the unsharded weight's shape, None if it is no linear."""
    module = model.get_submodule(layer)
    parent, dot, last = f"{layer}.".replace(".base_layer.", ".")[:-1].rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
    shapes: list[tuple[int, int] | None] = [None] * len(parts)
    if isinstance(module, LinearBase):
        shapes = [(size, module.input_size) for size in output_sizes(module, len(parts))]
    return {f"{parent}{dot}{part}": shape for part, shape in zip(parts, shapes, strict=True)}


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Keep vLLM from warning of each layer that gets no weights."""
    logger = logging.getLogger(initialize_layerwise_reload.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR if quiet else before)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    return info.can_load() and (not info.load_numel or mixtures.holds_base(layer))


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
    if getattr(runner, "lora_manager", None) is None:
        return
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.lora_manager.remove_all_adapters()
