# SPDX-License-Identifier: Apache-2.0
"""List where a vLLM model takes each tensor of a Hugging Face folder, and check that exactly those come."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase

from megarl.checkpoint_engine.receiver.adapters.adapter_plan import output_sizes, rename_mapper
from megarl.checkpoint_engine.receiver.experts import mixtures, plain_mixtures
from megarl.checkpoint_engine.receiver.fused import fused_name
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError


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
        loading: returns the context in which the model loads.
    """

    targets: dict[str, Target]
    shapes: dict[str, tuple[int, int]]
    fused: dict[str, tuple[Target, list[str]]]
    loading: Callable[[], AbstractContextManager]

    def of(self, name: str) -> tuple[Target | None, list[str]]:
        """Return a tensor's target, None if it has none, and the names that it covers."""
        if name in self.targets:
            return self.targets[name], [name]
        return self.fused.get(name, (None, []))


class Expected:
    """Checks the tensors of one transfer against what a model takes.

    Args:
        model: vLLM's model.
        layout: its layout.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self._layout, self._mapper = layout, rename_mapper(model)
        self._pending = set(layout.targets)

    def take(self, name: str, shape: tuple[int, ...]) -> str:
        """Note that a tensor came; return the name by which ``model.load_weights`` takes it.

        Raises:
            WeightSyncError: the tensor came twice, has no place or a wrong shape.
        """
        mapped = self._mapper._map_name(name) if self._mapper is not None else name
        target, parts = self._layout.of(mapped)
        if target is None or not self._pending.issuperset(parts):
            raise WeightSyncError(
                f"tensor '{name}' came twice or is no parameter of the model; if it is a tensor of the model's "
                "files, vLLM takes it only from there: set checkpoint_engine.base_weights=disk"
            )
        if shape != (needed := self._layout.shapes.get(mapped, shape)):
            raise WeightSyncError(f"tensor '{name}' has shape {shape}, the model needs {needed}")
        self._pending.difference_update(parts)
        # The model renames Hugging Face's names itself; only a name inside a LoRA wrapper is not one of them.
        return name if mapped == target.load else target.load

    def came(self) -> set[str]:
        """Return the layers of which a tensor came."""
        targets = self._layout.targets
        return {targets[name].layer for name in targets.keys() - self._pending}

    def check_all(self, whole: bool) -> None:
        """Raise ``WeightSyncError`` if a tensor is missing: of the model if ``whole``, else of a layer that came."""
        came, targets = self.came(), self._layout.targets
        if missing := {name for name in self._pending if whole or targets[name].layer in came}:
            raise WeightSyncError(f"parameters that no tensor reached: {listed(missing)}")


class Offered:
    """Tensors that ``model.load_weights`` takes one by one, and the last that it took.

    Args:
        tensors: (Hugging Face name, the name by which the model takes it, tensor).
    """

    def __init__(self, tensors: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        self._tensors, self._last = tensors, "to load any tensor"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (the model's name, tensor)."""
        for name, load, tensor in self._tensors:
            self._last = f"tensor '{name}' of shape {tuple(tensor.shape)}"
            yield load, tensor

    def refused(self, error: Exception) -> WeightSyncError:
        """Return the error of a model that raised ``error`` while it loaded."""
        return WeightSyncError(f"vLLM refused {self._last}: {error!r}")


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
        return Layout(targets, shapes, {}, partial(plain_mixtures.loading, model))
    inner = manager._adapter_manager
    for name, _, names in mixtures.experts_of(inner):
        layer = f"{name}.base_layer{plain_mixtures.SUFFIX}"
        targets |= {part: Target(load, layer) for part, load in mixtures.base_names(name, names, plain).items()}
    return Layout(targets, mixtures.base_shapes(inner), {}, partial(mixtures.loading_base, inner))


def _unfused(model: Any, layer: str) -> dict[str, tuple[int, int] | None]:
    """Map the Hugging Face name of each part of a layer to the unsharded weight's shape, None if it is no linear."""
    module = model.get_submodule(layer)
    parent, dot, last = f"{layer}.".replace(".base_layer.", ".")[:-1].rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
    shapes: list[tuple[int, int] | None] = [None] * len(parts)
    if isinstance(module, LinearBase):
        shapes = [(size, module.input_size) for size in output_sizes(module, len(parts))]
    return {f"{parent}{dot}{part}": shape for part, shape in zip(parts, shapes, strict=True)}
