# SPDX-License-Identifier: Apache-2.0
"""Leave an adapter's product with B to the kernel that reads the linear's output next.

The update of a wide output by a low-rank product moves that output through memory twice more, which takes longer than
the product itself. SwiGLU, the sum with the residual, and what lies between the projection of q, k and v and attention
read the output anyway, so their kernels add the update in float32 before they round. Linears that can leave it have two
methods, ``apart`` and ``projection`` (``megarl.lora.layers.parallel_linear``); all others are called as always.

Shapes: T tokens, I input and O output features, R sum of the ranks of the linear's parts, r rank of one part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megarl.model.weights.fusion import HeadLayout, part_views


class Part(NamedTuple):
    """B of one part of a linear.

    Attributes:
        matrix: B, ``[O of the part, r]``.
        start: first of the part's columns of ``Update.low``. Parts may share columns.
        scale: factor of the product.
    """

    matrix: torch.Tensor
    start: int
    scale: float


class Update(NamedTuple):
    """The product that is still to be added to a linear's output.

    Attributes:
        low: ``[..., R]``.
        parts: of each part of the output, in order, what is added to it: ``scale * low[:, start:][:, :r] @ matrix.T``;
            None for nothing.
    """

    low: torch.Tensor
    parts: tuple[Part | None, ...]


class Operands(NamedTuple):
    """A frozen linear and its adapter, for an operation that computes them with what lies around them.

    Attributes:
        weight: the base's, ``[O, I]``.
        matrices_a: every A, ``[R of it, I]``.
        matrices: B of each part that has one, ``[O of the part, r]``.
        starts, scales: of each part, as ``Part`` has them; -1 and 0 for a part without an adapter.
        room: memory that begins with the weight, with room for the rows of ``matrices_a`` behind it, or None.
    """

    weight: torch.Tensor
    matrices_a: Sequence[torch.Tensor]
    matrices: Sequence[torch.Tensor]
    starts: Sequence[int]
    scales: Sequence[float]
    room: torch.Tensor | None


# Elements of which the rows that ``with_room`` makes are multiples: Triton then compiles kernels for aligned rows.
ALIGNED = 16
# A linear's output, and a bias or an update that is not yet added.
Outcome = tuple[torch.Tensor, torch.Tensor | Update | None]


def apart(linear: Any, hidden: torch.Tensor, low: torch.Tensor | None = None, *, through: bool = True) -> Outcome:
    """Call a linear; leave its adapter's update to the caller if the linear can.

    Args:
        linear: any of mcore's linears, with or without adapters.
        hidden: ``[..., I]``.
        low: the product of ``hidden`` and ``projection(linear)``, where that is not None.
        through: the gradient of ``hidden`` takes in what comes back through ``low``. What made ``low`` then gets its
            gradient for A alone. False if that adds to the gradient of ``hidden`` itself.
    """
    return linear.apart(hidden, low, through=through) if hasattr(linear, "apart") else linear(hidden)


def projection(linear: Any) -> torch.Tensor | None:
    """Return every A of a linear's adapters, ``[R, I]``, if ``apart`` takes the product with them; else None."""
    return linear.projection() if hasattr(linear, "projection") else None


def operands(linear: Any) -> Operands | None:
    """Return what an operation needs that computes a linear with what lies behind it; None if it cannot."""
    return linear.operands() if hasattr(linear, "operands") else None


def flattened(update: Update | None, count: int) -> tuple[Any, ...]:
    """Return an update as an autograd function takes it: low, the places of its parts, their matrices.

    A place is a part's ``(start, scale)``, or None; ``count`` is the number of parts.
    """
    low, parts = update or (None, (None,) * count)
    assert len(parts) == count
    places = tuple(part and (part.start, part.scale) for part in parts)
    return low, places, *(part and part.matrix for part in parts)


def with_room(like: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for ``like [..., O]``, and for ``[..., columns]`` with a row behind each of the first's.

    So one product takes both, ``in_one_piece``.
    """
    width = like.shape[-1]
    whole = like.new_empty(*like.shape[:-1], -(-(width + columns) // ALIGNED) * ALIGNED)
    return whole[..., :width], whole[..., width : width + columns]


def in_one_piece(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor | None:
    """Return ``[T, O + columns]`` if two tensors lie as ``with_room`` made them; else None."""
    (rows, *_, width), columns, stride = wide.shape, narrow.shape[-1], wide.stride(0)
    behind = narrow.data_ptr() - wide.data_ptr() == width * wide.itemsize
    fits = stride == narrow.stride(0) >= width + columns and wide.numel() == rows * width
    if not (behind and fits and wide.stride(-1) == narrow.stride(-1) == 1):
        return None
    same = wide.untyped_storage().data_ptr() == narrow.untyped_storage().data_ptr()
    return wide.as_strided((rows, width + columns), (stride, 1)) if same else None


def input_gradient(
    by_out: torch.Tensor, by_low: torch.Tensor, weight: torch.Tensor, matrix: torch.Tensor, room: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of a linear's input, from those of its output and of the input's product with A.

    Args:
        by_out, by_low: ``[..., O]`` and ``[..., R]``. One product forms the result if ``with_room`` made them.
        weight, room: see ``Operands``. The rows behind the weight are overwritten.
        matrix: every A, ``[R, I]``.
    """
    whole = in_one_piece(by_out, by_low)
    # The weight may have been moved or cast since the room was made.
    outputs, rank = weight.shape[0], matrix.shape[0]
    held = room is not None and room.shape[0] >= outputs + rank and room.data_ptr() == weight.data_ptr()
    if whole is not None and room is not None and held:
        room[outputs : outputs + rank] = matrix
        by_hidden = whole @ room[: outputs + rank]
    else:
        rows, narrow = (one.reshape(-1, one.shape[-1]) for one in (by_out, by_low))
        by_hidden = (rows @ weight).addmm_(narrow, matrix)
    return by_hidden if by_out.dim() == 2 else by_hidden.view(*by_out.shape[:-1], -1)


def product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale * left @ right``, scaled inside the product, before rounding."""
    return torch.addmm(right.new_empty(()), left, right, beta=0, alpha=scale)


def update_gradients(
    by_out: torch.Tensor,
    low: torch.Tensor,
    places: Sequence[Any],
    matrices: Sequence[torch.Tensor | None],
    heads: HeadLayout | None = None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of an update's ``low`` and of each matrix, from that of the linear's output; on a GPU.

    Args:
        by_out: ``[..., O]``.
        low, places, matrices: as ``flattened`` returns them.
        heads: set if the parts are queries, keys and values, which lie head by head. Otherwise the parts lie one after
            the other, and are equally wide.
        into: memory for the gradient of ``low``, in its shape.
    """
    from megarl.model.layers.kernels import narrow_gradients as kernel

    into = torch.empty_like(low, memory_format=torch.contiguous_format) if into is None else into
    if kernel.takes(matrices):
        return kernel.narrow_gradients(by_out, low, places, matrices, heads, into)
    rows, below = by_out.reshape(-1, by_out.shape[-1]), low.reshape(-1, low.shape[-1])
    if heads is not None:
        return _gradients_by_heads(rows, below, places, matrices, heads, into)
    by_matrices = [
        None if matrix is None else product(piece.t(), below[:, place[0] :][:, : matrix.shape[1]], place[1])
        for piece, place, matrix in zip(rows.chunk(len(places), dim=1), places, matrices, strict=True)
    ]
    return (low_gradient(by_out, places, matrices, into), *by_matrices)


def low_gradient(
    by_out: torch.Tensor, places: Sequence[Any], matrices: Sequence[torch.Tensor | None], into: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of an update's ``low``, and return it; its parts lie one after the other, equally wide.

    Args:
        by_out, places, matrices, into: see ``update_gradients``.
    """
    rows, seen = by_out.reshape(-1, by_out.shape[-1]), set[int]()
    narrow = into.view(len(rows), -1)
    for piece, place, matrix in zip(rows.chunk(len(places), dim=1), places, matrices, strict=True):
        if matrix is not None:
            start, scale = place
            columns = narrow[:, start : start + matrix.shape[1]]
            torch.addmm(columns, piece, matrix, beta=start in seen, alpha=scale, out=columns)
            seen.add(start)
    return into


def _gradients_by_heads(
    rows: torch.Tensor, below: torch.Tensor, places: Any, matrices: Any, heads: HeadLayout, into: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Do what ``update_gradients`` does by two products with one matrix ``[O, R]`` that holds every part's B."""
    scales = {place[1] for place in places if place}
    common = scales.pop() if len(scales) == 1 else 1.0
    wide, by_wide = rows.new_zeros(rows.shape[1], below.shape[1]), product(rows.t(), below, common)
    by_matrices: list[torch.Tensor | None] = []
    views = zip(part_views(wide, "qkv", heads), part_views(by_wide, "qkv", heads), strict=True)
    for (view, by_view), place, matrix in zip(views, places, matrices, strict=True):
        if matrix is None:
            by_matrices.append(None)
            continue
        start, scale = place
        columns, factor = slice(start, start + matrix.shape[1]), scale / common
        slot, by_slot = view[..., columns], by_view[..., columns]
        slot.copy_(matrix.view(slot.shape))
        by_matrix = by_slot.reshape(matrix.shape)
        if factor != 1.0:
            slot.mul_(factor)
            by_matrix = by_matrix * factor
        by_matrices.append(by_matrix)
    torch.addmm(wide.new_empty(()), rows, wide, beta=0, alpha=common, out=into.view(len(rows), -1))
    return (into, *by_matrices)
