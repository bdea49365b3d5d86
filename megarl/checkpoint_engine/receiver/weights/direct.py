# SPDX-License-Identifier: Apache-2.0
"""Write base or merged weights straight into the parameters of a running vLLM model, as they arrive.

That is possible where vLLM's kernels read parameters in the checkpoint's layout: on GPUs, without quantisation. vLLM's
own loaders say once where each tensor goes (``regions``). A transfer afterwards is one kernel per bucket that writes
and digests, and one that reads back. A parameter that lies in the trainer's memory (``borrowed``) is only compared.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from megarl.checkpoint_engine.buckets.filling import DTYPES, shape_of, tensor_bytes
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.receiver.experts.mixtures import keeps_layout
from megarl.checkpoint_engine.receiver.weights.base_weights import drop_adapters
from megarl.checkpoint_engine.receiver.weights.borrowed import is_borrowed
from megarl.checkpoint_engine.receiver.weights.bucket_writes import BucketWrites, write_transfer
from megarl.checkpoint_engine.receiver.weights.model_layout import Expected, layout_of
from megarl.checkpoint_engine.receiver.weights.regions import Regions, find_regions
from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.records import Manifest, Receipt
from megarl.checkpoint_engine.wire import Place, Places, listed
from megarl.errors import WeightSyncError

# Methods of layers that leave parameters as the loaders fill them, except on CPUs.
PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


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
        self._regions: Regions = {}
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
                device = torch.device(self._runner.device)
                self._regions |= find_regions(self._model, self._layout, self._config, device, new)
            self._writes[places] = BucketWrites(places, [list(_writes(place, self._regions)) for place in places])
        return self._writes[places]

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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writes(place: Place, regions: Regions) -> Iterator[Write]:
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
        source = Source(place.bucket, dtype, start, shape, region.strides)
        yield Write(place.name, target, source, 1.0, held=is_borrowed(target))
