# SPDX-License-Identifier: Apache-2.0
"""Locate an adapter's matrices in PEFT's file, in which transformers 5 stacks the experts of a layer.

A file with ``target_parameters`` holds one pair for all E experts of a parameter. A is ``[E * r, in]``, with the rows
of one expert after those of the other. B is ``[out, r * E]``; expert e has its columns e, e + E, e + 2E, ... (PEFT
0.21, ``ParamWrapper.get_delta_weight``). In B of gate and up, gate's rows come before up's. PEFT wraps the experts once
per parameter: gate and up are ``experts.base_layer`` inside ``experts``, or ``experts`` if down is not adapted.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megarl.errors import AdapterError
from megarl.families import WeightMap
from megarl.families.base import DOWN, GATE_UP, STACKED_EXPERTS
from megarl.model.weights.sharded_tensor import Sliceable
from megarl.peft.names import matrix_name

# Suffixes of the names of stacked parameters.
STACKS = tuple(f".{name}" for name in STACKED_EXPERTS)


class Place(NamedTuple):
    """Location of one matrix in the file.

    Attributes:
        file: name of the tensor in the file.
        side: ``"A"`` or ``"B"``.
        expert, experts: index of the matrix's expert, and the number of stacked experts; None and 1 without stacking.
        part, parts: index of the part among the tensor's parts. In B of gate and up, gate is 0 of 2; a shared A is 0 of
            1.
    """

    file: str
    side: str = ""
    expert: int | None = None
    experts: int = 1
    part: int = 0
    parts: int = 1


def locate_matrices(targets: Mapping[str, str], names: WeightMap) -> dict[str, Place]:
    """Map the names (``matrix_name``) of A and B of each adapted linear to their location in the file.

    Args:
        targets: from ``resolve_targets``.
        names: tensor names of the model.
    """
    adapted = set(targets.values())
    parameters = {name: linears for name, linears in names.parameter_names().items() if name in adapted}
    places: dict[str, Place] = {}
    for name, key in targets.items():
        module = key.removesuffix(".weight") if key in parameters else name
        if not key.endswith(STACKS):
            places |= {matrix_name(name, side): Place(matrix_name(module, side)) for side in "AB"}
    for key, linears in parameters.items():
        if key.endswith(STACKS):
            module, parts = _wrapper(key, parameters), len(linears) // names.num_experts
            for number, name in enumerate(linears):
                expert, part = divmod(number, parts)
                # Up uses gate's A.
                places[matrix_name(name, "A")] = Place(matrix_name(module, "A"), "A", expert, names.num_experts)
                b = Place(matrix_name(module, "B"), "B", expert, names.num_experts, part, parts)
                places[matrix_name(name, "B")] = b
    return places


def _wrapper(key: str, adapted: Iterable[str]) -> str:
    """Return PEFT's module for a stacked parameter. If both are adapted, down's is the outer module."""
    experts, _, leaf = key.rpartition(".")
    return f"{experts}.base_layer" if leaf == GATE_UP and f"{experts}.{DOWN}" in adapted else experts


class AdapterFile:
    """An opened weights file, read matrix by matrix, stacked or not.

    Args:
        source: from ``safetensors.safe_open``.
        targets: from ``resolve_targets``.
        names: tensor names of the model.
    """

    def __init__(self, source: Any, targets: Mapping[str, str], names: WeightMap) -> None:
        self.source = source
        self.places = locate_matrices(targets, names)
        self._last: dict[tuple[str, int, int], torch.Tensor] = {}

    def get_slice(self, name: str) -> Sliceable:
        """Return a matrix by its own name, or any other tensor of the file."""
        place = self.places.get(name, Place(name))
        if place.expert is None:
            return self.source.get_slice(place.file)
        return _Stacked(self, place)

    def pair(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole A and B of a linear."""
        a, b = (self.get_slice(matrix_name(module, side))[:, :] for side in "AB")
        return a, b

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return rows of a stacked B, cached until other layers' are read, since each expert asks for them."""
        key = (name, start, end)
        if key not in self._last:
            if len(self._last) > 3:
                self._last.clear()
            self._last[key] = self.source.get_slice(name)[start:end]
        return self._last[key]


class _Stacked:
    """One expert's matrix within a stacked tensor."""

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
        """Return ``[r, in]`` for A, ``[out, r]`` for B."""
        rows, columns = self.whole
        if self.place.side == "A":
            return [rows // self.place.experts, columns]
        return [rows // self.place.parts, columns // self.place.experts]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice of rows and columns; slices must not have steps."""
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
    """Turn a stream of whole matrices into the file's tensors, yielding each once all of its parts have come.

    Args:
        stream: ``(name, matrix)`` pairs: parameters, gradients or anything else of their shapes.
        places: from ``locate_matrices``.
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
    """Stack all experts' matrices: A ``[E * r, in]``, B ``[out, r * E]``."""
    experts = [[came[expert, part] for part in range(place.parts)] for expert in range(place.experts)]
    if place.side == "A":
        return torch.cat([a for (a,) in experts])
    return torch.stack([torch.cat(parts) for parts in experts], dim=-1).flatten(1)
