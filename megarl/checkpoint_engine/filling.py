# SPDX-License-Identifier: Apache-2.0
"""Fill buckets with tensors, and form their digests; view the tensors inside a bucket."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.checkpoint_engine.digests import as_bytes, begin_digests, need_triton
from megarl.checkpoint_engine.wire import Place, Places

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


@dataclass
class Filling:
    """A bucket before it is filled.

    Attributes:
        places: the places of its tensors.
        tensors: the tensors, in order.
        table: how a GPU copies them, once that is known.
    """

    places: Places
    tensors: list[torch.Tensor]
    table: Any = None


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
            from megarl.checkpoint_engine.kernels.ranges import copies, flatten, flatten_table

            device = payload.device
            if filling.table is None and all(t.device == device for t in filling.tensors) and copies(filling.tensors):
                filling.table = flatten_table(filling.places, filling.tensors, device)
            if filling.table is not None:
                sums = flatten(payload, filling.table)
                return lambda: as_bytes(sums)
        self._copy(payload, filling)
        return begin_digests(payload, filling.places)

    @torch.no_grad()
    def _copy(self, payload: torch.Tensor, filling: Filling) -> None:
        key = (payload.data_ptr(), filling.places)
        if (views := self._views.get(key)) is None:
            views = [view_of(payload, place) for place in filling.places]
            if self._keeps:
                self._views[key] = views
        torch._foreach_copy_(views, filling.tensors, non_blocking=payload.is_cuda)


def view_of(payload: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor inside a bucket."""
    part = payload[place.offset : place.offset + place.nbytes]
    return part.view(DTYPES[place.dtype]).view(place.shape)
