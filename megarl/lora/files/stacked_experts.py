# SPDX-License-Identifier: Apache-2.0
"""Where an adapter's matrices lie in PEFT's file, when transformers 5 stacks the experts of a layer.

A file with ``target_parameters`` holds one pair for all E experts of a parameter: A is ``[E * r, in]``, one expert's
rows after the other's; B is ``[out, r * E]``, of which expert e has every E-th column from e on (PEFT 0.21,
``ParamWrapper.get_delta_weight``). B of gate and up has gate's rows before up's. PEFT wraps the experts once for each
parameter: gate and up are ``experts.base_layer`` beneath ``experts``, or ``experts`` where down is not adapted.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megarl.errors import AdapterError
from megarl.families import WeightMap
from megarl.families.base import STACKED_EXPERTS
from megarl.lora.targets.parameters import DOWN, GATE_UP
from megarl.model.weights.sharded_tensor import Sliceable
from megarl.peft.names import matrix_name

# Ends of stacked parameters' names.
STACKS = tuple(f".{name}" for name in STACKED_EXPERTS)


class Place(NamedTuple):
    """Where one matrix lies.

    Attributes:
        file: the tensor's name in the file.
        side: ``"A"`` or ``"B"``.
        expert, experts: its expert, and how many are stacked; None and 1 where nothing is.
        part, parts: gate is the first of two in B of gate and up; a shared A is one of one.
    """

    file: str
    side: str = ""
    expert: int | None = None
    experts: int = 1
    part: int = 0
    parts: int = 1


def places_of(targets: Mapping[str, str], names: WeightMap) -> dict[str, Place]:
    """Name (``matrix_name``) of A and B of each adapted linear -> where it lies.

    Args:
        targets: from ``resolve_targets``.
        names: the model's.
    """
    adapted = set(targets.values())
    parameters = {name: linears for name, linears in names.parameter_names().items() if name in adapted}
    found: dict[str, Place] = {}
    for name, key in targets.items():
        module = key.removesuffix(".weight") if key in parameters else name
        if not key.endswith(STACKS):
            found |= {matrix_name(name, side): Place(matrix_name(module, side)) for side in "AB"}
    for key, linears in parameters.items():
        if key.endswith(STACKS):
            module, parts = _wrapper(key, parameters), len(linears) // names.num_experts
            for number, name in enumerate(linears):
                expert, part = divmod(number, parts)
                # Up uses gate's A.
                found[matrix_name(name, "A")] = Place(matrix_name(module, "A"), "A", expert, names.num_experts)
                b = Place(matrix_name(module, "B"), "B", expert, names.num_experts, part, parts)
                found[matrix_name(name, "B")] = b
    return found


def _wrapper(key: str, adapted: Iterable[str]) -> str:
    """PEFT's module for a stacked parameter: down's is the outer one of two."""
    experts, _, leaf = key.rpartition(".")
    return f"{experts}.base_layer" if leaf == GATE_UP and f"{experts}.{DOWN}" in adapted else experts


class AdapterFile:
    """An opened weights file, read matrix by matrix, whatever is stacked in it.

    Args:
        source: from ``safetensors.safe_open``.
        targets: from ``resolve_targets``.
        names: the model's.
    """

    def __init__(self, source: Any, targets: Mapping[str, str], names: WeightMap) -> None:
        self.source = source
        self.places = places_of(targets, names)
        self._last: dict[tuple[str, int, int], torch.Tensor] = {}

    def get_slice(self, name: str) -> Sliceable:
        """A matrix by its own name, or any other tensor of the file."""
        place = self.places.get(name, Place(name))
        if place.expert is None:
            return self.source.get_slice(place.file)
        return _Stacked(self, place)

    def pair(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a linear, whole."""
        a, b = (self.get_slice(matrix_name(module, side))[:, :] for side in "AB")
        return a, b

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows of a stacked B; kept until those of other layers are asked for, since each expert asks for them."""
        key = (name, start, end)
        if key not in self._last:
            if len(self._last) > 3:
                self._last.clear()
            self._last[key] = self.source.get_slice(name)[start:end]
        return self._last[key]


class _Stacked:
    """One expert's matrix in a stacked tensor."""

    def __init__(self, file: AdapterFile, place: Place) -> None:
        self.file, self.place = file, place
        rows, columns = file.source.get_slice(place.file).get_shape()
        fits = rows % place.experts == 0 if place.side == "A" else rows % place.parts == columns % place.experts == 0
        if not fits:
            raise AdapterError(
                f"'{place.file}' has shape [{rows}, {columns}], which {place.experts} experts cannot share"
            )
        self.whole = rows, columns

    def get_shape(self) -> list[int]:
        """``[r, in]`` or ``[out, r]``."""
        rows, columns = self.whole
        if self.place.side == "A":
            return [rows // self.place.experts, columns]
        return [rows // self.place.parts, columns // self.place.experts]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Slices of rows and columns, without steps."""
        index = index if isinstance(index, tuple) else (index, slice(None))
        shape = self.get_shape()
        (top, bottom, _), (left, right, _) = (cut.indices(size) for cut, size in zip(index, shape, strict=True))
        place, expert = self.place, self.place.expert or 0
        if place.side == "A":
            first = expert * shape[0]
            return self.file.source.get_slice(place.file)[first + top : first + bottom, left:right]
        first = place.part * shape[0]
        rows = self.file.rows(place.file, first + top, first + bottom)
        return rows[:, expert :: place.experts][:, left:right]


def pack(stream: Iterable[tuple[str, torch.Tensor]], places: Mapping[str, Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of whole matrices by their own names -> the file's tensors, each as soon as all of its parts have come.

    Args:
        stream: of parameters, gradients or anything else of their shapes.
        places: from ``places_of``.
    """
    waiting: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in stream:
        place = places[name]
        if place.expert is None:
            yield place.file, tensor
            continue
        came = waiting.setdefault(place.file, {})
        came[place.expert, place.part] = tensor
        if len(came) == place.experts * place.parts:
            yield place.file, _stack(waiting.pop(place.file), place)


def _stack(came: dict[tuple[int, int], torch.Tensor], place: Place) -> torch.Tensor:
    """All experts' matrices as one: A ``[E * r, in]``, B ``[out, r * E]``."""
    experts = [[came[expert, part] for part in range(place.parts)] for expert in range(place.experts)]
    if place.side == "A":
        return torch.cat([a for (a,) in experts])
    return torch.stack([torch.cat(parts) for parts in experts], dim=-1).flatten(1)
