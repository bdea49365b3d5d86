# SPDX-License-Identifier: Apache-2.0
"""Write base or merged weights straight into the parameters of a running vLLM model, as they arrive.

That is possible where vLLM's kernels read parameters in the checkpoint's layout: on GPUs, without quantisation. vLLM's
own loaders say where each tensor goes: they are given tensors without values (``meta``) once, and what they would copy
into which part of which parameter is noted and not done. So fusing, tensor parallelism and experts are vLLM's own, and
a transfer afterwards is one kernel per bucket that writes and digests, and one that reads back.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from megarl.checkpoint_engine.buckets.filling import DTYPES, shape_of, tensor_bytes
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.receiver.adapters.adapter_plan import SPACE
from megarl.checkpoint_engine.receiver.experts.mixtures import keeps_layout
from megarl.checkpoint_engine.receiver.weights.base_weights import drop_adapters
from megarl.checkpoint_engine.receiver.weights.bucket_writes import BucketWrites, write_transfer
from megarl.checkpoint_engine.receiver.weights.model_layout import Expected, layout_of
from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.records import Manifest, Receipt
from megarl.checkpoint_engine.wire import Place, Places, listed
from megarl.errors import WeightSyncError

# Methods of layers that leave parameters as the loaders fill them, except on CPUs.
PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class Region(NamedTuple):
    """A part of a tensor, and the part of a parameter that it fills.

    Attributes:
        target: view of the parameter, ``[r, c]``.
        offset, strides: of the same elements in the tensor, in elements.
    """

    target: torch.Tensor
    offset: int
    strides: tuple[int, int]


def takes_direct_writes(model: torch.nn.Module, device: str = "cuda") -> bool:
    """Return True if the parameters of vLLM's model are in the checkpoint's layout, on a type of device."""
    for layer in model.modules():
        # The methods of experts are modules too, without parameters.
        if isinstance(layer, QuantizeMethodBase):
            continue
        parameters = list(layer.parameters(recurse=False))
        if not all(parameter.device.type == device for parameter in parameters):
            return False
        method = getattr(layer, "quant_method", None)
        if parameters and not (method is None or type(method) in PLAIN_METHODS or keeps_layout(layer)):
            return False
        # Whatever else works weights out after loading may keep copies of them.
        if hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention:
            return False
    return True


class DirectLoader:
    """Loads transfers into one model. What it has found out of a bucket's tensors is used again.

    Args:
        runner: vLLM's model runner.
        vllm_config: the worker's config.
    """

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        self._runner, self._config, self._model = runner, vllm_config, runner.get_model()
        self._layout = layout_of(self._model, getattr(runner, "lora_manager", None))
        # By name, dtype and shape of a tensor.
        self._regions: dict[tuple, list[Region]] = {}
        self._writes: dict[Places, BucketWrites] = {}
        # Transfers that were found to be complete, by their places and by whether they were of the whole model.
        self._complete: set[tuple[Places, bool]] = set()

    def load(self, inbox: Inbox, *, whole: bool) -> tuple[Manifest, Receipt]:
        """Replace parameters of the model. All adapters are dropped.

        Args:
            inbox: the transfer.
            whole: as for ``base_weights.load_weights``.

        Raises:
            WeightSyncError: as ``base_weights.load_weights``; also if a parameter does not hold what was written.
            UnsupportedError: the experts are in another layout than the checkpoint's.
        """
        manifest, receipt = write_transfer(inbox, self._writes_of)
        places = manifest.tensors.places
        if (places, whole) not in self._complete:
            self._check_complete(places, whole)
            self._complete.add((places, whole))
        drop_adapters(self._runner)
        return manifest, receipt

    def _writes_of(self, places: Places) -> BucketWrites:
        """Return the writes of a bucket; prepared once."""
        if places not in self._writes:
            if new := [place for place in places if place[:3] not in self._regions]:
                self._regions |= self._find(new)
            self._writes[places] = BucketWrites(places, [list(_writes(place, self._regions)) for place in places])
        return self._writes[places]

    def _find(self, places: list[Place]) -> dict[tuple, list[Region]]:
        """Return the regions of tensors, from vLLM's loaders.

        Raises:
            WeightSyncError: the model has no place for a tensor, its shape is wrong, or a loader computes with it.
        """
        expected = Expected(self._model, self._layout)
        names = [expected.take(place.name, place.shape) for place in places]
        space = torch.empty(len(places) * SPACE, dtype=torch.uint8, device="meta")
        given = []
        for number, (name, place) in enumerate(zip(names, places, strict=True)):
            part = space[number * SPACE :][: tensor_bytes(place)]
            given.append((name, part.view(DTYPES[place.dtype]).view(place.shape)))
        noted = _Noted(space)
        config, device = set_current_vllm_config(self._config), torch.device(self._runner.device)
        try:
            with config, device, self._layout.loading(), noted:
                self._model.load_weights(iter(given))
        except (AssertionError, ValueError, RuntimeError) as error:
            raise WeightSyncError(f"vLLM refused a tensor, or its shape: {error!r}") from error
        regions: dict[tuple, list[Region]] = {place[:3]: [] for place in places}
        for target, source in noted.copies:
            number, begin = divmod(source.storage_offset() * source.itemsize, SPACE)
            target, source = _matrix(target), _matrix(source)
            strides = source.stride(0), source.stride(1)
            regions[places[number][:3]].append(Region(target, begin // source.itemsize, strides))
        if lost := [key[0] for key, found in regions.items() if not found]:
            raise WeightSyncError(f"vLLM's loaders put no part of {listed(lost)} into a parameter")
        return regions

    def _check_complete(self, places: Places, whole: bool) -> None:
        """Raise ``WeightSyncError`` if a tensor or a part of one did not come, or no tensor reached a parameter."""
        expected, sizes = Expected(self._model, self._layout), dict[str, int]()
        for place in places:
            sizes[place.name] = sizes.get(place.name, 0) + place.nbytes
            if not place.start:
                expected.take(place.name, place.shape)
        if partial := {place.name for place in places if sizes[place.name] != tensor_bytes(place)}:
            raise WeightSyncError(f"only some rows came of {listed(partial)}")
        expected.check_all(whole)
        if not whole:
            return
        reached = {_storage(region.target) for place in places for region in self._regions[place[:3]]}
        lost = [name for name, one in self._model.named_parameters() if one.numel() and _storage(one) not in reached]
        if lost:
            raise WeightSyncError(f"parameters that no tensor reached: {listed(lost)}")


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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writes(place: Place, regions: dict[tuple, list[Region]]) -> Iterator[Write]:
    """Yield the writes of a tensor, or of those of its rows that lie in this bucket."""
    dtype = DTYPES[place.dtype]
    for region in regions[place[:3]]:
        target, offset = region.target, region.offset
        if shape_of(place) != place.shape:
            width = tensor_bytes(place) // dtype.itemsize // place.shape[0]
            if len(place.shape) != 2 or region.strides != (width, 1):
                raise WeightSyncError(
                    f"tensor '{place.name}' of shape {place.shape} is larger than a bucket, and vLLM does not load it "
                    "row by row; raise checkpoint_engine.bucket_mib"
                )
            # Rows of the tensor in this bucket, and of those the ones in the region.
            first, begin = place.start // (width * dtype.itemsize), offset // width
            low = max(first, begin)
            high = min(first + shape_of(place)[0], begin + len(target))
            if low >= high:
                continue
            target, offset = target[low - begin : high - begin], offset + (low - begin - first) * width
        start = place.offset // dtype.itemsize + offset
        shape = (target.shape[0], target.shape[1])
        yield Write(place.name, target, Source(place.bucket, dtype, start, shape, region.strides), 1.0)
