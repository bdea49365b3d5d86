# SPDX-License-Identifier: Apache-2.0
"""Switch an adapter of PEFT on and off, list its tensors by name, save, load and merge it."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Embedding, LoraLayer, ParamWrapper

from megarl.errors import AdapterError, UnsupportedError
from megarl.files import user_path
from megarl.hf.base_tensors import BASE
from megarl.hf.files import load_into
from megarl.lora.files import peft_folder
from megarl.lora.layers.matrices import generator_of
from megarl.lora.targets.resolve import with_stable_patterns
from megarl.model.weights.sharded_tensor import ShardedTensor, Update, collect, parameter_view
from megarl.model.weights.sums import with_update
from megarl.parallel.groups import on_rank_zero
from megarl.peft.names import BASE_WEIGHT, PREFIX
from megarl.peft.rules import rank_and_scaling

# A matrix's parameter on the model: its name in PEFT's file, but for the adapter's name between.
MATRIX = re.compile(r"(.+?\.lora_(?:embedding_)?[AB])\.([^.]+)(\.weight)?")


class PeftAdapter:
    """An adapter that PEFT has put on a model. Every data-parallel rank holds all of it.

    Attributes:
        name: tells the model's adapters apart; no file contains it.
        trainable: False if the adapter is frozen.
        config: PEFT's config.
        layers: maps the Hugging Face name of each adapted module to PEFT's layer.
    """

    def __init__(self, name: str, model: PeftModel, *, trainable: bool, seed: int) -> None:
        """Take an adapter that is on the model, and draw its matrices anew from ``seed``."""
        self.name, self.trainable, self._model = name, trainable, model
        self.config: LoraConfig = model.peft_config[name]
        self.layers: dict[str, Any] = {
            module_name.removeprefix(PREFIX): module
            for module_name, module in model.named_modules()
            if isinstance(module, LoraLayer) and (name in module.lora_A or name in module.lora_embedding_A)
        }
        found = ((MATRIX.fullmatch(key), parameter) for key, parameter in model.named_parameters())
        held = {match[1] + (match[3] or ""): parameter for match, parameter in found if match and match[2] == name}
        self._parameters: dict[str, torch.nn.Parameter] = dict(sorted(held.items()))
        self._draw(seed)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draw A uniformly on +-1 / sqrt(in) and set B to 0, as PEFT does, but alike at every layout and back end."""
        for name, layer in self.layers.items():
            generator = generator_of(name, seed)
            if isinstance(layer, Embedding):
                matrix = layer.lora_embedding_B[self.name]
                matrix.copy_(torch.empty(matrix.shape).normal_(generator=generator))
                layer.lora_embedding_A[self.name].zero_()
                continue
            matrix = layer.lora_A[self.name].weight
            bound = matrix.shape[1] ** -0.5
            matrix.copy_(torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator))
            layer.lora_B[self.name].weight.zero_()

    @property
    def dropout(self) -> float:
        """Probability of dropping an input of the adapter during training."""
        return self.config.lora_dropout

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return ``(PEFT name, parameter)`` of the matrices."""
        return list(self._parameters.items())

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]:
        """Return the matrices, or ``values`` of their names and shapes, as whole tensors."""
        held: Mapping[str, torch.Tensor] = self._parameters if values is None else values
        return [
            parameter_view(name, held[name].data, tuple(parameter.shape), None)
            for name, parameter in self._parameters.items()
        ]

    def activate(self) -> None:
        """Compute with this adapter and no other from now on."""
        for layer in _lora_layers(self._model):
            # Not set_adapter, which also decides what is trained.
            layer._active_adapter = [self.name]

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Compute with this adapter inside the ``with`` block."""
        layers = _lora_layers(self._model)
        before = [layer._active_adapter for layer in layers]
        self.activate()
        try:
            yield
        finally:
            for layer, active in zip(layers, before, strict=True):
                layer._active_adapter = active

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model alone inside the ``with`` block. Nothing is merged or copied."""
        layers = _lora_layers(self._model)
        before = [layer._disable_adapters for layer in layers]
        try:
            for layer in layers:
                layer._disable_adapters = True
            yield
        finally:
            for layer, value in zip(layers, before, strict=True):
                layer._disable_adapters = value

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the tensors of PEFT's file on every rank."""
        return ((name, parameter.data) for name, parameter in self._parameters.items())

    def in_file(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the stream: ``tensors()`` are named as in PEFT's file."""
        return iter(stream)

    def adapted(self) -> set[str]:
        """Return the names of the modules that ``merged`` changes."""
        return set(self.layers)

    @property
    def unties(self) -> bool:
        """True if ``merged`` needs a separate tensor for the output layer although the model ties it."""
        tied = bool(self._model.get_base_model().config.get_text_config().tie_word_embeddings)
        return tied and bool(self._vocabulary())

    def merged(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]:
        """Return base tensors that add this adapter's update when read: in fp32, rounded once, out of place.

        Args:
            tensors: the base's tensors under Hugging Face names.

        Raises:
            UnsupportedError: the adapter is on a stack of experts.
        """
        updates = {f"{name}.weight": layer for name, layer in self.layers.items()}
        if stacked := [name for name, layer in self.layers.items() if isinstance(layer, ParamWrapper)]:
            raise UnsupportedError(
                f"'{stacked[0]}' is a stack of experts, whose adapter model.backend=transformers does not merge; "
                "sync it as an adapter (checkpoint_engine.content=adapter)"
            )
        return [with_update(t, self._update_of(updates[t.name])) if t.name in updates else t for t in tensors]

    def _update_of(self, layer: Any) -> Callable[[], Update]:
        name = self.name

        def update() -> Update:
            if isinstance(layer, Embedding):  # B @ A has the embedding's columns as its rows
                factors = layer.lora_embedding_B[name].T, layer.lora_embedding_A[name].T
            else:
                factors = layer.lora_A[name].weight, layer.lora_B[name].weight
            return Update(*factors, layer.scaling[name])

        return update

    def adapter_config(self) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``; not to be changed, every sync asks for them."""
        return self._file_config

    @functools.cached_property
    def _file_config(self) -> dict[str, Any]:
        names = [_pattern_name(name, layer) for name, layer in self.layers.items()]
        return peft_folder.plain_config(with_stable_patterns(copy.deepcopy(self.config), names))

    def save(self, path: str | Path, experts: str = "as_trained") -> None:
        """Write a PEFT directory. Collective. Rank 0 writes it atomically.

        Args:
            path: the directory; replaced if it exists.
            experts: must be ``"as_trained"``, since the back end does not convert experts.

        Raises:
            AdapterError: the directory cannot be written.
        """
        write = self.snapshot(experts)
        on_rank_zero(lambda: write(Path(path)))

    def snapshot(self, experts: str = "as_trained") -> Callable[[Path], None]:
        """Copy the adapter to rank 0's host memory; return the function that writes the copy. Collective."""
        tensors, config = collect(self.export()), self.adapter_config()
        return lambda path: peft_folder.write(path, tensors, config)

    def read(self, path: str | Path) -> None:
        """Load a PEFT directory, made by any back end at any layout.

        Raises:
            AdapterError: a file is damaged or belongs to another model; or targets, rank or alpha are not this
                adapter's. Nothing was changed.
        """
        folder = user_path("adapter", path)
        theirs = peft_folder.load_peft_config(folder)
        for name, layer in self.layers.items():
            here = layer.r[self.name], layer.scaling[self.name]
            there = rank_and_scaling(theirs, _pattern_name(name, layer))
            if here != there:
                raise AdapterError(
                    f"{folder / peft_folder.CONFIG}: '{name}' has (rank, scaling) {there} in the file and {here} here; "
                    "start from it by lora.init_from"
                )
        load_into(folder / peft_folder.WEIGHTS, self._parameters, self._vocabulary())

    def _vocabulary(self) -> dict[str, torch.Tensor]:
        """Return the base weights of an adapted embedding or output layer, by the names that PEFT stores them under."""
        causal = self._model.get_base_model()
        ends = causal.get_input_embeddings(), causal.get_output_embeddings()
        return {
            f"{PREFIX}{name}{BASE_WEIGHT}": layer.get_base_layer().weight
            for name, layer in self.layers.items()
            if any(layer is end for end in ends)
        }


def _pattern_name(name: str, layer: Any) -> str:
    """Return the name that PEFT compares its patterns with: a module's, or that of the one parameter that is adapted.

    Args:
        name: name of PEFT's layer in the model. If it adapts one of several parameters of a module, layers are nested.
        layer: the layer.
    """
    if not isinstance(layer, ParamWrapper):
        return name
    return f"{name.replace(BASE, '')}.{layer.parameter_name}"


def _lora_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]
