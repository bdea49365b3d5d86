# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that has been put on a model: names, switch, save, load, export."""

import contextlib
import copy
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
from megarl.lora.files.load import Holder, load_matrices
from megarl.lora.files.stacked_experts import Place, pack, places_of
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan
from megarl.lora.layers.parallel_linear import ParallelLoraLinear
from megarl.lora.merge import merge_weight
from megarl.lora.optimizer import check_copies, renew_copies
from megarl.lora.targets.resolve import resolve_targets, unties
from megarl.model.weights.sharded_tensor import ShardedTensor, collect, parameter_view, placed
from megarl.model.weights.streaming import stream_full
from megarl.parallel.groups import Groups, on_rank_zero
from megarl.peft.names import matrix_name


@dataclasses.dataclass(frozen=True)
class Slot:
    """One adapted part of a layer on this pipeline stage.

    Attributes:
        part: what is adapted.
        kind: the class of its layer.
        layer: the wrapped linear; None where another expert-parallel rank has it.
        own: the adapter's matrices there; None likewise.
    """

    part: PartPlan
    kind: type[ParallelLoraLinear]
    layer: ParallelLoraLinear | None
    own: AdapterMatrices | None

    def matrices(self) -> dict[str, torch.nn.Parameter]:
        """PEFT name -> this rank's matrix; empty where another rank has it."""
        if self.own is None:
            return {}
        held = {"A": self.own.lora_A, "B": self.own.lora_B}
        return {self.name(side): held[side][self.part.key] for side in self.part.sides}

    def name(self, side: str) -> str:
        """PEFT's name of A or B in the weights file."""
        return matrix_name(self.part.name, side)

    def shapes(self) -> dict[str, tuple[tuple[int, int], int | None]]:
        """PEFT name -> (shape in the file, dimension split over the kind's axis)."""
        part = self.part
        shapes = {
            "A": ((part.rank, part.in_features), self.kind.split_of(part, "A")),
            "B": ((part.out_features, part.rank), self.kind.split_of(part, "B")),
        }
        return {self.name(side): shapes[side] for side in part.sides}


class LoraAdapter:
    """Handle returned by ``apply_lora``.

    Attributes:
        name: by which the model's adapters are told apart; it is in no file.
        trainable: False for a frozen one.
        slots: the adapted parts of this rank's pipeline stage, those of experts on other ranks included.
        config: the PEFT config it was made from.
        names: the model's names.
        groups: this rank's place.
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
        """Probability with which an input of the adapter is dropped while training."""
        return self.config.lora_dropout

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices: as they were made, or as the model was cast since."""
        return next((matrix.dtype for _, matrix in self.parameters()), self._dtype)

    def activate(self) -> None:
        """Compute with this adapter and no other from now on, as PEFT's ``set_adapter``. Nothing is copied."""
        for layer in wrapped_layers(self._models):
            layer.active = self.name if self.name in layer.adapters else None

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Compute with this adapter within the block."""
        with _restored(self._models):
            self.activate()
            yield

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model alone within the block; nothing is merged or copied."""
        with _restored(self._models) as layers:
            for layer in layers:
                layer.active = None
            yield

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave every adapter out of the model's state dicts, plain and sharded, within the block.

        For distributed checkpoints of the base that were made without adapters: a sharded state dict with them asks the
        checkpoint for them.
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
        """Wait until every matrix here holds the last update; see ``AdapterMatrices.wait``."""
        for own in {id(slot.own): slot.own for slot in self.slots if slot.own is not None}.values():
            own.wait()

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(PEFT name, parameter)`` of this rank's matrices, in the order of ``tensors()``."""
        return [named for slot in self.slots for named in slot.matrices().items()]

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]:
        """The stage's matrices as sharded tensors, those held elsewhere included.

        Their names are those of PEFT's file, but where PEFT stacks experts each has its own; see ``in_file``.

        Args:
            values: PEFT name -> tensor shaped like the parameter, to be handled in its place (optimizer moments, fp32
                main weights, gradients).
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
        """Stream the tensors of PEFT's file, whole, on every rank. Collective over TP, EP and PP."""
        return self.in_file(stream_full(self.tensors(), self.groups))

    def in_file(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """A stream of whole tensors under the names of ``tensors()`` -> under those of PEFT's file."""
        return pack(stream, self._places)

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        """Where the file has each matrix; once, since a mixture of experts has tens of thousands."""
        return places_of(resolve_targets(self.config, self.names), self.names)

    @functools.cached_property
    def _file_config(self) -> dict[str, Any]:
        return peft_folder.config_dict(self.config, self.names)

    def merged(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]:
        """Base tensors with this adapter added when they are read: in fp32, rounded once, out of place.

        Args:
            tensors: this rank's base tensors under Hugging Face names.
        """
        self.wait()
        updates = {f"{slot.part.name}.weight": slot for slot in self.slots if slot.own is not None}
        return [_with_update(t, updates[t.name]) if t.name in updates else t for t in tensors]

    @property
    def unties(self) -> bool:
        """Whether ``merged`` needs lm_head's own tensor though the model ties it to the embedding."""
        return unties(self.names.hf_config, resolve_targets(self.config, self.names))

    def adapter_config(self) -> dict[str, Any]:
        """The contents of ``adapter_config.json``."""
        return copy.deepcopy(self._file_config)

    def save(self, path: str | Path, experts: str = AS_TRAINED) -> None:
        """Write a PEFT directory. Collective; rank 0 writes, atomically.

        Args:
            path: replaced if it exists.
            experts: ``lora.save_experts``: ``as_trained``, ``stacked`` or ``per_expert``.

        Raises:
            AdapterError: the directory cannot be written.
            UnsupportedError: the experts cannot be saved that way; see ``arrange_config``.
        """
        write = self.snapshot(experts)
        on_rank_zero(lambda: write(Path(path)))

    def snapshot(self, experts: str = AS_TRAINED) -> Callable[[Path], None]:
        """Copy the adapter to rank 0's host memory. Collective.

        Args:
            experts: as for ``save``.

        Returns:
            For rank 0: writes the copy as a PEFT directory, on any thread and however training went on.
        """
        config, names = self.config, self.names
        arrange_config(config, names, experts)  # before anything is copied
        tensors = collect(self.export())

        def write(path: Path) -> None:
            arranged, theirs = arrange(tensors, config, names, experts)
            peft_folder.write(path, arranged, peft_folder.config_dict(theirs, names))

        return write

    def load(self, path: str | Path, optimizer: Any | None = None) -> None:
        """Read a PEFT directory made at any layout, or by PEFT; each rank reads only its slices.

        Args:
            path: the directory.
            optimizer: mcore's that trains this adapter (from ``get_megatron_optimizer``), if there is one already: its
                fp32 copies are renewed. Its moments stay.

        Raises:
            AdapterError: truncated file, missing or unexpected tensor, wrong shape, or other targets, rank or alpha
                than this adapter's; or mcore's optimizer has copies of the matrices and is not given. Nothing is
                changed then.
            UnsupportedError: an optimizer whose copies cannot be renewed.
        """
        check_copies(self.parameters(), optimizer)
        self.read(path)
        if optimizer is not None:
            renew_copies(optimizer)

    def read(self, path: str | Path) -> None:
        """As ``load``, for a caller that sets the optimizer's copies itself."""
        layers = {slot.part.name: slot.layer for slot in self.slots if slot.layer}
        load_matrices(path, Holder(self.config, self.names, self.tensors(), layers, self.groups))


def wrapped_layers(models: Iterable[torch.nn.Module]) -> list[ParallelLoraLinear]:
    """Every layer of a model that has an adapter on this rank."""
    return [module for model in models for module in model.modules() if isinstance(module, ParallelLoraLinear)]


@contextlib.contextmanager
def _restored(models: Iterable[torch.nn.Module]) -> Iterator[list[ParallelLoraLinear]]:
    """Yield the wrapped layers and give each its active adapter back afterwards."""
    layers = wrapped_layers(models)
    before = [layer.active for layer in layers]
    try:
        yield layers
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


def _with_update(base: ShardedTensor, slot: Slot) -> ShardedTensor:
    """``base`` whose ``read`` adds ``scaling * B @ A``; for this rank's slice."""

    def read() -> torch.Tensor:
        assert slot.layer is not None and slot.own is not None  # the caller leaves out what is elsewhere
        return merge_weight(base.read(), *slot.layer.factors(slot.own, slot.part), slot.part.scaling)

    return dataclasses.replace(base, read=read)
