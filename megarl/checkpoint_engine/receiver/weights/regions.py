# SPDX-License-Identifier: Apache-2.0
"""Find the parts of vLLM's parameters that each tensor of a checkpoint fills.

vLLM's own loaders say so: they are given tensors without values (``meta``), and what they would copy into which part of
which parameter is noted and not done. So fusing, tensor parallelism and experts are vLLM's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config

from megarl.checkpoint_engine.buckets.filling import DTYPES, tensor_bytes
from megarl.checkpoint_engine.receiver.adapters.adapter_plan import SPACE
from megarl.checkpoint_engine.receiver.weights.model_layout import Expected, Layout, Offered
from megarl.checkpoint_engine.wire import Place, listed
from megarl.errors import WeightSyncError


class Region(NamedTuple):
    """A part of a tensor, and the part of a parameter that it fills.

    Attributes:
        target: view of the parameter, ``[r, c]``.
        offset, strides: of the same elements in the tensor, in elements.
    """

    target: torch.Tensor
    offset: int
    strides: tuple[int, int]


# By name, dtype and shape of a tensor.
Regions = dict[tuple, list[Region]]


def find_regions(
    model: torch.nn.Module, layout: Layout, vllm_config: Any, device: torch.device, places: Sequence[Place]
) -> Regions:
    """Return the regions of tensors.

    Args:
        model: vLLM's model.
        layout: its layout.
        vllm_config: the worker's config.
        device: the worker's.
        places: the tensors; only name, dtype and shape count.

    Raises:
        WeightSyncError: the model has no place for a tensor, its shape is wrong, or a loader computes with it.
        UnsupportedError: the experts are in another layout than the checkpoint's.
    """
    expected = Expected(model, layout)
    names = [expected.take(place.name, place.shape) for place in places]
    space = torch.empty(len(places) * SPACE, dtype=torch.uint8, device="meta")
    given = []
    for number, (name, place) in enumerate(zip(names, places, strict=True)):
        part = space[number * SPACE :][: tensor_bytes(place)]
        given.append((place.name, name, part.view(DTYPES[place.dtype]).view(place.shape)))
    noted, offered = _Noted(space), Offered(given)
    try:
        with set_current_vllm_config(vllm_config), device, layout.loading(), noted:
            model.load_weights(iter(offered))
    except (AssertionError, ValueError, RuntimeError) as error:
        raise offered.refused(error) from error
    regions: Regions = {place[:3]: [] for place in places}
    for target, source in noted.copies:
        number, begin = divmod(source.storage_offset() * source.itemsize, SPACE)
        target, source = _matrix(target), _matrix(source)
        strides = source.stride(0), source.stride(1)
        regions[places[number][:3]].append(Region(target, begin // source.itemsize, strides))
    if lost := [key[0] for key, found in regions.items() if not found]:
        raise WeightSyncError(f"vLLM's loaders put no part of {listed(lost)} into a parameter")
    return regions


class _Noted(TorchDispatchMode):
    """Notes what would be copied out of a memory without values, and copies nothing of it.

    Attributes:
        copies: (target, source) of each copy.
    """

    def __init__(self, space: torch.Tensor) -> None:
        super().__init__()
        self._space = space.untyped_storage()._cdata
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Run an operation, or note it."""
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            target, source = args[:2]
            if source.untyped_storage()._cdata != self._space:
                raise RuntimeError("its loader computes with it")
            if target.shape != source.shape:
                raise RuntimeError(f"a tensor of shape {tuple(source.shape)} for one of {tuple(target.shape)}")
            self.copies.append((target, source))
            return target
        return func(*args, **(kwargs or {}))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view ``[r, c]`` of a vector or matrix, or of a matrix with further dimensions of size 1 before it."""
    while tensor.ndim > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim > 2:
        raise WeightSyncError(f"vLLM loads a tensor of shape {tuple(tensor.shape)}; written directly are matrices")
    return tensor if tensor.ndim == 2 else tensor.reshape(1, -1)
