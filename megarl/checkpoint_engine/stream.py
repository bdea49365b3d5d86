"""Tensors -> buckets -> tensors, over any transport. Digests are computed at both ends from the bytes themselves."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

from megarl.checkpoint_engine.base import Receiver, Sender
from megarl.checkpoint_engine.plan import plan_buckets
from megarl.checkpoint_engine.wire import (
    Kind,
    Manifest,
    Receipt,
    TensorMeta,
    checksum,
    listed,
    metas_from_bytes,
    metas_to_bytes,
)
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


def send_tensors(
    sender: Sender,
    tensors: Iterable[Named],
    *,
    version: int,
    kind: Kind,
    adapter_config: dict[str, Any] | None,
    bucket_bytes: int,
) -> Manifest:
    """Send a stream of full tensors and its manifest.

    Args:
        sender: open sender.
        tensors: (name, tensor) of any device; float32, float16 or bfloat16. Consumed bucket by bucket.
        version: policy version.
        kind: ``"adapter"`` or ``"base"``.
        adapter_config: PEFT's ``adapter_config.json`` for adapters, else None.
        bucket_bytes: limit of one bucket.

    Returns:
        The manifest that was sent.

    Raises:
        WeightSyncError: a dtype that cannot be sent, or the transport's failure.
    """
    metas: list[TensorMeta] = []
    for index, bucket in enumerate(plan_buckets(tensors, lambda named: named[1].nbytes, bucket_bytes)):
        (_, last), offset = bucket[-1]
        payload = sender.buffer(offset + last.nbytes)
        filled = [_fill(payload, index, start, name, tensor) for (name, tensor), start in bucket]
        sender.put(metas_to_bytes(filled), payload)
        metas += filled
    manifest = Manifest(version, kind, tuple(metas), adapter_config)
    sender.end(manifest.to_bytes())
    return manifest


class Inbox:
    """The receiving end of one transfer: iterate, then ``finish``.

    Iterating yields ``(name, tensor)``; each tensor is a view of its bucket and was checked against its digest.
    """

    def __init__(self, receiver: Receiver, index: int) -> None:
        self._receiver = receiver
        self._index = index
        self._metas: list[TensorMeta] = []
        self._manifest: Manifest | None = None

    def __iter__(self) -> Iterator[Named]:
        while True:
            header, payload = self._receiver.take()
            if payload is None:
                self._manifest = Manifest.from_bytes(header)
                return
            for meta in metas_from_bytes(header):
                tensor = _view(payload, meta)
                self._metas.append(meta)
                yield meta.name, tensor

    def finish(self) -> tuple[Manifest, Receipt]:
        """Compare what arrived with the manifest.

        Returns:
            The manifest, and the receipt computed from the bytes that arrived.

        Raises:
            WeightSyncError: naming the tensors that are missing, unexpected or different.
        """
        if self._manifest is None:
            raise WeightSyncError("the transfer was not read to its end")
        _compare({meta.name: meta for meta in self._metas}, {meta.name: meta for meta in self._manifest.tensors})
        receipt = Receipt(
            version=self._manifest.version,
            kind=self._manifest.kind,
            receiver=self._index,
            count=len(self._metas),
            nbytes=sum(meta.nbytes for meta in self._metas),
            checksum=checksum(self._metas, self._manifest.adapter_config),
        )
        receipt.check(self._manifest)
        return self._manifest, receipt


def digest(tensor: torch.Tensor) -> str:
    """xxh3-64 of a contiguous CPU tensor's bytes, hexadecimal."""
    return xxhash.xxh3_64(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _fill(payload: torch.Tensor, bucket: int, offset: int, name: str, tensor: torch.Tensor) -> TensorMeta:
    """Copy one tensor into the bucket and describe it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightSyncError(f"tensor '{name}' has dtype {dtype}; weights travel as {', '.join(DTYPES)}")
    part = payload[offset : offset + tensor.nbytes]
    part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return TensorMeta(name, dtype, tuple(tensor.shape), bucket, offset, tensor.nbytes, digest(part))


def _view(payload: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor inside a bucket, once its bytes are proven."""
    dtype = DTYPES.get(meta.dtype)
    part = payload[meta.offset : meta.offset + meta.nbytes]
    if dtype is None or part.nbytes != meta.nbytes or torch.Size(meta.shape).numel() * dtype.itemsize != meta.nbytes:
        raise WeightSyncError(f"tensor '{meta.name}' ({meta.dtype}, shape {meta.shape}) does not fit its bucket")
    found = digest(part)
    if found != meta.digest:
        raise WeightSyncError(f"tensor '{meta.name}' arrived damaged: checksum {found}, sent {meta.digest}")
    return part.view(dtype).view(meta.shape)


def _compare(arrived: dict[str, TensorMeta], sent: dict[str, TensorMeta]) -> None:
    """Raise ``WeightSyncError`` naming the tensors in which two sets differ."""
    for problem, names in (
        ("did not arrive", sent.keys() - arrived.keys()),
        ("arrived but is not in the manifest", arrived.keys() - sent.keys()),
        ("differs from the manifest", {name for name in arrived.keys() & sent.keys() if arrived[name] != sent[name]}),
    ):
        if names:
            raise WeightSyncError(f"tensor {problem}: {listed(names)}")
