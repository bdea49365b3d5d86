# SPDX-License-Identifier: Apache-2.0
"""Switch a LoRA adapter on a model on and off, list its tensors by name, save, load and export it."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from megarl.families import WeightMap
from megarl.lora.files import peft_folder
from megarl.lora.files.arrangements import AS_TRAINED, arrange, arrange_config
from megarl.lora.files.load import LoadTarget, load_matrices
from megarl.lora.files.stacked_experts import Place, locate_matrices, pack
from megarl.lora.layers.parallel_linear import ParallelLoraLinear
from megarl.lora.optimizer import check_copies, renew_copies
from megarl.lora.slot import Held, Slot
from megarl.lora.targets.resolve import resolve_targets, unties
from megarl.model.weights.sharded_tensor import ShardedTensor, Update, collect, parameter_view, placed
from megarl.model.weights.streaming import stream_full
from megarl.model.weights.sums import with_update
from megarl.parallel.groups import Groups, on_rank_zero


class LoraAdapter:
    """A LoRA adapter on a model, as ``apply_lora`` returns it.

    Attributes:
        name: tells the model's adapters apart; no file contains it.
        trainable: False if the adapter is frozen.
        slots: adapted parts of this rank's pipeline stage, including those of experts on other ranks.
        config: the PEFT config that the adapter was made from.
        names: tensor names of the base model.
        groups: this rank's process groups.
    """

    def __init__(
        self,
        name: str,
        models: Sequence[torch.nn.Module],
        slots: list[Slot],
        config: LoraConfig,
        names: WeightMap,
        dtype: torch.dtype,
        groups: Groups,
        *,
        trainable: bool,
    ) -> None:
        self.name, self.trainable = name, trainable
        self._models = tuple(models)
        self.slots = slots
        self.config = config
        self.names = names
        self._dtype = dtype
        self.groups = groups

    @property
    def dropout(self) -> float:
        """Probability of dropping an input of the adapter during training."""
        return self.config.lora_dropout

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices, as they were made or as the model was cast later."""
        return next((matrix.dtype for _, matrix in self.parameters()), self._dtype)

    def activate(self) -> None:
        """Compute with this adapter and no other from now on, as PEFT's ``set_adapter`` does. Copies nothing."""
        for layer in wrapped_layers(self._models):
            layer.active = self.name if self.name in layer.adapters else None

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Compute with this adapter inside the ``with`` block."""
        with _restored(self._models):
            self.activate()
            yield

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model alone inside the ``with`` block. Nothing is merged or copied."""
        with _restored(self._models) as layers:
            for layer in layers:
                layer.active = None
            yield

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Exclude all adapters from the model's state dicts, plain and sharded, inside the ``with`` block.

        Use it to load a distributed checkpoint of the base that was made without adapters: a sharded state dict that
        holds adapters would request them from the checkpoint.
        """
        layers = wrapped_layers(self._models)
        for layer in layers:
            layer.states_adapters = False
        try:
            yield
        finally:
            for layer in layers:
                layer.states_adapters = True

    def wait(self) -> None:
        """Wait until all of this rank's matrices hold the last update; see ``AdapterMatrices.wait``."""
        for adapter in {id(slot.adapter): slot.adapter for slot in self.slots if slot.adapter is not None}.values():
            adapter.wait()

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return ``(PEFT name, parameter)`` of this rank's matrices, in the order of ``tensors()``."""
        return [(name, held[key]) for name, held, key in self._held]

    @functools.cached_property
    def _held(self) -> list[Held]:
        return [held for slot in self.slots for held in slot.held]

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]:
        """Return the stage's matrices as sharded tensors, including those that other ranks hold.

        The names are those of PEFT's file, except that each expert's matrix has its own name even where PEFT stacks
        them; see ``in_file``.

        Args:
            values: maps PEFT names to tensors shaped like the parameters, to be used instead of these (optimizer
                moments, fp32 main weights, gradients).
        """
        dtype = self.dtype if values is None else torch.float32
        if values is None:
            self.wait()
        tensors = []
        for slot in self.slots:
            matrices = slot.matrices()
            for name, (shape, dim) in slot.shapes().items():
                if name in matrices:
                    data = matrices[name].data if values is None else values[name]
                else:
                    data = torch.empty(0, shape[1], dtype=dtype)
                tensor = parameter_view(name, data, shape, dim)
                if dim is not None:
                    tensor = dataclasses.replace(tensor, padded=slot.part.padded)
                tensors.append(placed(tensor, slot.kind.axis, slot.part.owner, self.groups))
        return tensors

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the whole tensors of PEFT's file on every rank. Collective over TP, EP and PP."""
        return self.in_file(stream_full(self.tensors(), self.groups))

    def in_file(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert a stream of whole tensors named as by ``tensors()`` into the tensors of PEFT's file."""
        return pack(stream, self._places)

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        """Place of each matrix in the file. Computed once, since a mixture of experts has tens of thousands."""
        return locate_matrices(resolve_targets(self.config, self.names), self.names)

    def merged(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]:
        """Return base tensors that add this adapter's update when read: in fp32, rounded once, out of place.

        Args:
            tensors: this rank's base tensors under Hugging Face names.
        """
        self.wait()
        updates = {f"{slot.part.name}.weight": slot for slot in self.slots if slot.adapter is not None}
        return [with_update(t, _update_of(updates[t.name])) if t.name in updates else t for t in tensors]

    def adapted(self) -> set[str]:
        """Return the names of the stage's modules that ``merged`` changes, on this rank or another."""
        return {slot.part.name for slot in self.slots}

    @property
    def unties(self) -> bool:
        """True if ``merged`` needs a separate tensor for lm_head although the model ties it to the embedding."""
        return unties(self.names.hf_config, resolve_targets(self.config, self.names))

    def adapter_config(self) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``; not to be changed, every sync asks for them."""
        return self._file_config

    @functools.cached_property
    def _file_config(self) -> dict[str, Any]:
        return peft_folder.config_dict(self.config, self.names)

    def save(self, path: str | Path, experts: str = AS_TRAINED) -> None:
        """Write a PEFT directory. Collective. Rank 0 writes it atomically.

        Args:
            path: the directory; replaced if it exists.
            experts: ``lora.save_experts``: ``as_trained``, ``stacked`` or ``per_expert``.

        Raises:
            AdapterError: the directory cannot be written.
            UnsupportedError: the experts cannot be saved in that form; see ``arrange_config``.
        """
        write = self.snapshot(experts)
        on_rank_zero(lambda: write(Path(path)))

    def snapshot(self, experts: str = AS_TRAINED) -> Callable[[Path], None]:
        """Copy the adapter to rank 0's host memory. Collective.

        Args:
            experts: as for ``save``.

        Returns:
            A function for rank 0 that writes the copy as a PEFT directory, on any thread, even after further training.
        """
        config, names = self.config, self.names
        arrange_config(config, names, experts)  # before anything is copied
        tensors = collect(self.export())

        def write(path: Path) -> None:
            arranged, theirs = arrange(tensors, config, names, experts)
            peft_folder.write(path, arranged, peft_folder.config_dict(theirs, names))

        return write

    def load(self, path: str | Path, optimizer: Any | None = None) -> None:
        """Read a PEFT directory made at any layout, or by PEFT. Each rank reads only its slices.

        Args:
            path: the directory.
            optimizer: mcore's optimizer that trains this adapter (from ``get_megatron_optimizer``), if it exists
                already. Its fp32 copies are renewed; its moments stay.

        Raises:
            AdapterError: the file is truncated; a tensor is missing, unexpected or of a wrong shape; targets, rank or
                alpha are not this adapter's; or mcore's optimizer has copies of the matrices and was not given. Nothing
                is changed then.
            UnsupportedError: the optimizer's copies cannot be renewed.
        """
        check_copies(self.parameters(), optimizer)
        self.read(path)
        if optimizer is not None:
            renew_copies(optimizer)

    def read(self, path: str | Path) -> None:
        """Load like ``load``, for a caller that renews the optimizer's copies itself."""
        layers = {slot.part.name: slot.layer for slot in self.slots if slot.layer}
        load_matrices(path, LoadTarget(self.config, self.names, self.tensors(), layers, self.groups))


def wrapped_layers(models: Iterable[torch.nn.Module]) -> list[ParallelLoraLinear]:
    """Return every layer of a model that has an adapter on this rank."""
    return [module for model in models for module in model.modules() if isinstance(module, ParallelLoraLinear)]


@contextlib.contextmanager
def _restored(models: Iterable[torch.nn.Module]) -> Iterator[list[ParallelLoraLinear]]:
    """Yield the wrapped layers, and restore each one's active adapter afterwards."""
    layers = wrapped_layers(models)
    before = [layer.active for layer in layers]
    try:
        yield layers
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


def _update_of(slot: Slot) -> Callable[[], Update]:
    """Return what returns a slot's update of this rank's part of the weight."""

    def update() -> Update:
        assert slot.layer is not None and slot.adapter is not None  # the caller leaves out matrices of other ranks
        return Update(*slot.layer.factors(slot.adapter, slot.part), slot.part.scaling)

    return update
