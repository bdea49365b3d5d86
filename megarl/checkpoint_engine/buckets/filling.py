# SPDX-License-Identifier: Apache-2.0
"""Divide tensors among buckets, fill buckets and form digests; view the tensors inside a bucket."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

import torch

from megarl.checkpoint_engine.buckets.digests import as_bytes, begin_digests, need_triton, starts_of
from megarl.checkpoint_engine.buckets.plan import plan_buckets
from megarl.checkpoint_engine.wire import Place, Places, Plan, known
from megarl.errors import WeightSyncError


class Deferred(Protocol):
    """A tensor that is computed when a bucket is filled. Indexed by a slice, it gives rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, rows: slice) -> Self: ...

    def value(self) -> torch.Tensor:
        """Return the tensor."""

    def runs(self) -> list[torch.Tensor] | None:
        """Return what the tensor consists of, in order, if nothing has to be computed; else None."""

    @staticmethod
    def writer(tensors: Sequence[Any], offsets: Sequence[int]) -> Callable[[torch.Tensor], Any]:
        """Return what writes tensors of one GPU into a buffer at byte offsets, as often as it is called."""


Named = tuple[str, torch.Tensor | Deferred]

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


@dataclass
class Filling:
    """A bucket before it is filled.

    Attributes:
        places: the places of its tensors.
        tensors: the tensors, in order; all deferred, or none.
        begin: begins to fill a bucket in a GPU's memory, and returns what waits for the digests; None if unknown yet.
    """

    places: Places
    tensors: list[torch.Tensor | Deferred]
    begin: Callable[[torch.Tensor], Callable[[], bytes]] | None = None


class _Rows(NamedTuple):
    """A tensor, or some of its rows.

    Attributes:
        name, shape: of the whole tensor.
        tensor: the rows.
        start: byte offset of the first row in the tensor.
    """

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor | Deferred
    start: int


def as_they_come(tensors: Iterable[Named], limit: int, split: bool) -> Iterator[Filling]:
    """Yield buckets of at most ``limit`` bytes.

    Args:
        tensors: (name, tensor) pairs.
        limit: bytes of a bucket.
        split: True divides a larger tensor into rows. A row that is larger, or the tensor if False, has a bucket of its
            own.

    Raises:
        WeightSyncError: a dtype cannot be sent.
    """
    rows = (part for name, tensor in tensors for part in _rows(name, tensor, limit if split else tensor.nbytes))
    for index, bucket in enumerate(plan_buckets(rows, lambda part: part.tensor.nbytes, limit)):
        places = Places(_place(part, index, offset) for part, offset in bucket)
        yield Filling(known(places), [part.tensor for part, _ in bucket])


def as_planned(tensors: Iterable[Named], plan: Plan) -> Iterator[Filling]:
    """Yield the plan's buckets with their tensors; raise ``WeightSyncError`` if others come."""
    stream = iter(tensors)
    for places in plan.places.buckets:
        held = []
        for place in places:
            name, tensor = next(stream, ("nothing", None))
            if tensor is None or (name, tuple(tensor.shape), DTYPES[place.dtype]) != (
                place.name,
                place.shape,
                tensor.dtype,
            ):
                raise WeightSyncError(f"the adapter changed: tensor '{place.name}' was planned, '{name}' was exported")
            held.append(tensor)
        yield Filling(places, held)
    if left := next(stream, None):
        raise WeightSyncError(f"the adapter changed: tensor '{left[0]}' was exported and not planned")


def _rows(name: str, tensor: torch.Tensor | Deferred, limit: int) -> Iterator[_Rows]:
    """Yield a tensor whole, or in runs of as many rows as ``limit`` bytes hold."""
    shape = tuple(tensor.shape)
    if tensor.nbytes <= limit or not shape:
        yield _Rows(name, shape, tensor, 0)
        return
    row = tensor.nbytes // shape[0]
    step = max(limit // row, 1)
    for first in range(0, shape[0], step):
        yield _Rows(name, shape, tensor[first : first + step], first * row)


def _place(part: _Rows, bucket: int, offset: int) -> Place:
    dtype = str(part.tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightSyncError(f"tensor '{part.name}' has dtype {dtype}; weights travel as {', '.join(DTYPES)}")
    return Place(part.name, dtype, part.shape, bucket, offset, part.tensor.nbytes, part.start)


class Filler:
    """Copies tensors into buckets.

    Args:
        keeps: True if the same buckets will be filled again, so that their views are kept.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._views: dict[tuple[int, Places], list[torch.Tensor]] = {}

    def fill(self, payload: torch.Tensor, filling: Filling) -> Callable[[], bytes]:
        """Begin to copy tensors into a bucket, ``[nbytes]`` uint8; the result waits for it, and returns the digests."""
        if payload.is_cuda:
            need_triton()
            filling.begin = filling.begin or _on_gpu(filling, payload.device)
            if filling.begin is not None:
                return filling.begin(payload)
        self._copy(payload, filling)
        return begin_digests(payload, filling.places)

    def forget(self, address: int) -> None:
        """Drop the views of the buffer at an address, which is to be freed."""
        self._views = {key: views for key, views in self._views.items() if key[0] != address}

    @torch.no_grad()
    def _copy(self, payload: torch.Tensor, filling: Filling) -> None:
        key = (payload.data_ptr(), filling.places)
        if (views := self._views.get(key)) is None:
            views = [view_of(payload, place) for place in filling.places]
            if self._keeps:
                self._views[key] = views
        values = [tensor if isinstance(tensor, torch.Tensor) else tensor.value() for tensor in filling.tensors]
        torch._foreach_copy_(views, values, non_blocking=payload.is_cuda)


def _on_gpu(filling: Filling, device: torch.device) -> Callable[[torch.Tensor], Callable[[], bytes]] | None:
    """Return ``Filling.begin`` for a bucket on ``device``; None if its tensors must be copied one by one."""
    places, tensors = filling.places, filling.tensors
    if any(tensor.device != device for tensor in tensors):
        return None
    runs = [[tensor] if isinstance(tensor, torch.Tensor) else tensor.runs() for tensor in tensors]
    if (copied := _by_copies(places, runs, device)) is not None:
        return copied
    if any(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    write = type(tensors[0]).writer(tensors, [place.offset for place in places])

    def begin(payload: torch.Tensor) -> Callable[[], bytes]:
        write(payload)
        return begin_digests(payload, places)

    return begin


def _by_copies(
    places: Places, runs: Sequence[list[torch.Tensor] | None], device: torch.device
) -> Callable[[torch.Tensor], Callable[[], bytes]] | None:
    """Return what copies tensors that consist of ``runs`` and digests them on the way; None if that is impossible."""
    from megarl.checkpoint_engine.kernels.ranges import copies, flatten, flatten_table
    from megarl.checkpoint_engine.kernels.replays import Replays

    known = [parts for parts in runs if parts is not None and copies(parts)]
    if len(known) < len(runs):
        return None
    table, starts, replays = flatten_table(places, known, device), starts_of(list(map(len, known))), Replays()

    def begin(payload: torch.Tensor) -> Callable[[], bytes]:
        replays.capture()  # the trainer's other threads wait for this one
        sums = replays.run((payload.data_ptr(), len(payload)), lambda: flatten(payload, table))
        return as_bytes(sums, starts)

    return begin


def shape_of(place: Place) -> tuple[int, ...]:
    """Return the shape of what lies in a place: the tensor's, or that of its rows."""
    if not place.shape or place.nbytes == tensor_bytes(place):
        return place.shape
    return (place.nbytes * place.shape[0] // tensor_bytes(place), *place.shape[1:])


def tensor_bytes(place: Place) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(place.shape) * DTYPES[place.dtype].itemsize


def view_of(payload: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor, or its rows, inside a bucket."""
    part = payload[place.offset : place.offset + place.nbytes]
    return part.view(DTYPES[place.dtype]).view(shape_of(place))


@lru_cache(maxsize=256)
def check_fit(places: Places, nbytes: int) -> None:
    """Raise ``WeightSyncError`` unless each place lies in a bucket of ``nbytes`` and has the bytes of its rows."""
    for place in places:
        dtype = DTYPES.get(place.dtype)
        end = place.offset + place.nbytes
        if dtype is None or end > nbytes or not _has_rows(place):
            raise WeightSyncError(f"tensor '{place.name}' ({place.dtype}, shape {place.shape}) does not fit its bucket")


def _has_rows(place: Place) -> bool:
    """Return True if a place has the bytes of its tensor, or of whole rows of it."""
    whole = tensor_bytes(place)
    if not place.start and place.nbytes == whole:
        return True
    row = whole // place.shape[0] if place.shape and place.shape[0] else 0
    inside = place.start + place.nbytes <= whole
    return bool(row) and inside and place.start % row == 0 and place.nbytes % row == 0
