# SPDX-License-Identifier: Apache-2.0
"""Let vLLM read base weights in the memory of the trainer on the same GPU, instead of holding them again.

Parameters are made without memory. Each that lies in the trainer's memory in one piece, as vLLM reads it, is then
mapped from there (CUDA IPC); the others get memory of their own. That happens before vLLM compiles or captures
anything. Nothing writes into what is borrowed: a base that arrives is compared with it, bit by bit (``direct``).

vLLM 0.32 reads weights of a daemon of its own in a like manner (``weight_cache``), in its layout and without LoRA.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from megarl.checkpoint_engine.buckets.filling import DTYPES
from megarl.checkpoint_engine.choice import own_memory
from megarl.checkpoint_engine.loan import Lent, Loan, loans_of
from megarl.checkpoint_engine.receiver.weights.model_layout import layout_of
from megarl.checkpoint_engine.receiver.weights.regions import Region, Regions, find_regions
from megarl.checkpoint_engine.wire import Place
from megarl.cuda_memory import opened
from megarl.errors import WeightSyncError

# What an engine asks vLLM for; its ``model_loader_extra_config`` names the file with the loan.
LOAD_FORMAT = "megarl_borrowed"
METHODS: tuple[Any, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
# Bytes that the first one of a parameter is aligned to; kernels read so many at once.
ALIGNED = 16


class Summary(NamedTuple):
    """The share of a model that is borrowed.

    Attributes:
        borrowed, total: bytes of the parameters that lie in the trainer's memory, and of all.
        own: last names of the modules whose parameters do not (``["qkv_proj"]``).
    """

    borrowed: int
    total: int
    own: list[str]


class _Opened:
    """The trainer's memory that this process has opened; one process has one model."""

    def __init__(self) -> None:
        self.pieces: set[int] = set()
        self.summary = Summary(0, 0, [])


_opened = _Opened()


def is_borrowed(tensor: torch.Tensor) -> bool:
    """Return True if a tensor lies in the trainer's memory."""
    return bool(_opened.pieces) and tensor.untyped_storage().data_ptr() in _opened.pieces


def summary() -> Summary:
    """Return what this process's model borrows."""
    return _opened.summary


@register_model_loader(LOAD_FORMAT)
class BorrowingLoader(BaseModelLoader):
    """Builds a model in the trainer's memory; ``model_loader_extra_config`` is ``{"loan": path}``."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Return the model. What is not borrowed has small random values, until a base arrives.

        Raises:
            WeightSyncError: the memory cannot be mapped, or nothing of it is as vLLM reads it.
        """
        self._vllm_config = vllm_config
        with _without_memory():
            return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Give every parameter its memory."""
        loans = loans_of(Path(self.load_config.model_loader_extra_config["loan"]).read_bytes())
        workers = get_tensor_model_parallel_world_size()
        if len(loans) != workers:
            raise WeightSyncError(
                f"sampler.share_base is true, and the engine has {workers} GPUs, but it got the loans of {len(loans)} "
                "trainer ranks; give it that of the rank on each (loan.joined)"
            )
        device = torch.device(self._vllm_config.device_config.device)
        borrow(model, loans[get_tensor_model_parallel_rank()], self._vllm_config, device)


def borrow(model: torch.nn.Module, loan: Loan, vllm_config: Any, device: torch.device) -> None:
    """Give the parameters that are without memory theirs: the trainer's, where it fits, or their own.

    Args:
        model: vLLM's model, as it was built in ``_without_memory``, without LoRA.
        loan: that of the trainer rank on the same GPU.
        vllm_config: the worker's config.
        device: the worker's.

    Raises:
        WeightSyncError: as ``BorrowingLoader.load_model``.
    """
    if loan.place != (here := own_memory()):
        raise WeightSyncError(
            f"sampler.share_base is true, but the engine's worker is on {here}, and the loan is that of a rank on "
            f"{loan.place}; give each worker that of the rank on its GPU"
        )
    layout = layout_of(model, None)._replace(loading=nullcontext)
    places = [Place(one.name, one.dtype, one.shape, 0, 0, 0, 0) for one in loan.tensors]
    regions = find_regions(model, layout, vllm_config, device, places)
    sources = _sources(loan, regions)
    memory = [_map(handle) for handle in loan.handles]
    borrowed, total, own = 0, 0, set[str]()
    for name, parameter in model.named_parameters():
        total += parameter.nbytes
        if not parameter.is_meta:
            continue
        source = sources.get(parameter.untyped_storage()._cdata)
        value = None if source is None else _view(memory[source[0]], source[1], parameter)
        if value is None:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            initialize_single_dummy_weight(value)
            own.add(name.split(".")[-2])
        else:
            borrowed += value.nbytes
        _give(parameter, value)
    if not borrowed:
        raise WeightSyncError(
            "sampler.share_base is true, but no parameter of the engine lies in the trainer's memory as vLLM reads it; "
            "set it to false"
        )
    _opened.pieces = {piece.untyped_storage().data_ptr() for piece in memory}
    _opened.summary = Summary(borrowed, total, sorted(own))


def _map(handle: bytes) -> torch.Tensor:
    try:
        return opened(handle)
    except RuntimeError as error:
        raise WeightSyncError(
            f"sampler.share_base is true, but this GPU cannot map the trainer's memory ({error}); set it to false"
        ) from error


def _sources(loan: Loan, regions: Regions) -> dict[int, tuple[int, int]]:
    """Map each parameter that lies in one piece of the trainer's memory, by its storage, to (piece, first byte)."""
    parts: dict[int, list[tuple[int, int, int, int]]] = {}
    sizes: dict[int, int] = {}
    for lent in loan.tensors:
        for region in regions[lent.name, lent.dtype, lent.shape]:
            key = region.target.untyped_storage()._cdata
            sizes[key] = region.target.untyped_storage().nbytes()
            parts.setdefault(key, []).append(_part(lent, region))
    return {key: found[0][2:] for key, found in parts.items() if _in_one_piece(sorted(found), sizes[key])}


def _part(lent: Lent, region: Region) -> tuple[int, int, int, int]:
    """Return (first byte in the parameter, bytes, piece, first byte of the parameter if it began in this piece)."""
    target, size = region.target, region.target.itemsize
    if not _is_whole(lent, region) or DTYPES[lent.dtype] != target.dtype:
        return 0, 0, -1, 0
    begin = target.storage_offset() * size
    row, column = divmod(region.offset, lent.shape[-1])
    inside = (row - lent.start[0]) * lent.size[1] + column - lent.start[1]
    return begin, target.nbytes, lent.memory, lent.offset + inside * size - begin


def _is_whole(lent: Lent, region: Region) -> bool:
    """Return True if a region lies in the trainer's part, in one piece, and as the parameter has it."""
    (rows, columns), (row, column) = region.target.shape, divmod(region.offset, lent.shape[-1])
    below, beside = row - lent.start[0], column - lent.start[1]
    inside = 0 <= below <= lent.size[0] - rows and 0 <= beside <= lent.size[1] - columns
    by_rows = region.strides[1] == 1 and (
        rows == 1 or (region.strides[0] == lent.shape[-1] and columns == lent.size[1])
    )
    return inside and by_rows and region.target.is_contiguous()


def _in_one_piece(parts: list[tuple[int, int, int, int]], nbytes: int) -> bool:
    """Return True if parts follow each other from the parameter's first byte to its last, in one piece of memory."""
    end = 0
    for begin, length, *source in parts:
        if begin != end or length == 0 or source != list(parts[0][2:]):
            return False
        end = begin + length
    return end == nbytes


def _view(piece: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes as the parameter's value; None if they are not aligned."""
    if (piece.data_ptr() + offset) % ALIGNED:
        return None
    return piece[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)


def _give(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter without memory a value; whoever holds it holds it still, with all its attributes."""
    other = torch.Tensor._make_subclass(type(parameter), value, False)
    vars(other).update(vars(parameter))
    torch.utils.swap_tensors(parameter, other)


class _NoMemory(TorchFunctionMode):
    """Makes ``torch.empty`` return tensors without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = dict(kwargs or {})
        return func(*args, **(given | {"device": "meta"} if func is torch.empty else given))


@contextmanager
def _without_memory() -> Iterator[None]:
    """Let vLLM make the weights of plain linears, embeddings and experts without memory."""
    before = [method.create_weights for method in METHODS]
    try:
        for method, create in zip(METHODS, before, strict=True):
            method.create_weights = _on_meta(create)
        yield
    finally:
        for method, create in zip(METHODS, before, strict=True):
            method.create_weights = create


def _on_meta(create: Callable[..., None]) -> Callable[..., None]:
    def create_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        with _NoMemory():
            create(self, *args, **kwargs)

    return create_weights
