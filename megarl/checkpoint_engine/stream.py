# SPDX-License-Identifier: Apache-2.0
"""Turn tensors into buckets and back, over any transport. Both ends compute digests from the bytes themselves."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from megarl.checkpoint_engine.base import Receiver, Sender
from megarl.checkpoint_engine.plan import plan_buckets
from megarl.checkpoint_engine.wire import (
    Kind,
    Manifest,
    Place,
    Receipt,
    TensorList,
    listed,
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
        tensors: (name, tensor) pairs on any device; float32, float16 or bfloat16. Consumed bucket by bucket.
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        adapter_config: PEFT's ``adapter_config.json`` for adapters, else None.
        bucket_bytes: limit of one bucket in bytes.

    Returns:
        The manifest that was sent.

    Raises:
        WeightSyncError: a dtype cannot be sent, or the transport failed.
    """
    places: list[Place] = []
    digests: list[str] = []
    for index, bucket in enumerate(plan_buckets(tensors, lambda named: named[1].nbytes, bucket_bytes)):
        (_, last), offset = bucket[-1]
        payload = sender.buffer(offset + last.nbytes)
        filled = [_fill(payload, index, start, name, tensor) for (name, tensor), start in bucket]
        raw = payload.numpy()
        part = TensorList(tuple(filled), tuple(digest(raw[p.offset : p.offset + p.nbytes]) for p in filled))
        sender.put(part.to_bytes(), payload)
        places += part.places
        digests += part.digests
    manifest = Manifest(version, kind, TensorList(tuple(places), tuple(digests)), adapter_config)
    sender.end(manifest.to_bytes())
    return manifest


class Inbox:
    """The receiving end of one transfer: iterate over it, then call ``finish``.

    Iterating yields ``(name, tensor)``. Each tensor is a view of its bucket and was checked against its digest.
    """

    def __init__(self, receiver: Receiver, index: int) -> None:
        self._receiver = receiver
        self._index = index
        self._places: list[Place] = []
        self._digests: list[str] = []
        self._manifest: Manifest | None = None

    def __iter__(self) -> Iterator[Named]:
        while True:
            header, payload = self._receiver.take()
            if payload is None:
                self._manifest = Manifest.from_bytes(header)
                return
            part = TensorList.from_bytes(header)
            raw = payload.numpy()
            for place, sent in zip(part.places, part.digests, strict=True):
                tensor = _view(payload, place)
                actual = digest(raw[place.offset : place.offset + place.nbytes])
                if actual != sent:
                    raise WeightSyncError(f"tensor '{place.name}' arrived damaged: checksum {actual}, sent {sent}")
                self._places.append(place)
                self._digests.append(sent)
                yield place.name, tensor

    def finish(self) -> tuple[Manifest, Receipt]:
        """Compare the received tensors with the manifest.

        Returns:
            The manifest, and the receipt computed from the received bytes.

        Raises:
            WeightSyncError: tensors are missing, unexpected or different; the message names them.
        """
        if self._manifest is None:
            raise WeightSyncError("the transfer was not read to its end")
        arrived = TensorList(tuple(self._places), tuple(self._digests))
        if arrived != self._manifest.tensors:
            _compare(arrived, self._manifest.tensors)
        receipt = Receipt(
            version=self._manifest.version,
            kind=self._manifest.kind,
            receiver=self._index,
            count=len(arrived),
            nbytes=arrived.nbytes,
            checksum=arrived.checksum(self._manifest.adapter_config),
        )
        receipt.check(self._manifest)
        return self._manifest, receipt


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. One pass over the bytes; ``isfinite`` on a CPU makes several."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


def digest(raw: np.ndarray) -> str:
    """Return the xxh3-64 of bytes ``[n]`` uint8, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(raw.data)


def _fill(payload: torch.Tensor, bucket: int, offset: int, name: str, tensor: torch.Tensor) -> Place:
    """Copy one tensor into the bucket."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightSyncError(f"tensor '{name}' has dtype {dtype}; weights travel as {', '.join(DTYPES)}")
    part = payload[offset : offset + tensor.nbytes]
    part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return Place(name, dtype, tuple(tensor.shape), bucket, offset, tensor.nbytes)


def _view(payload: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor inside a bucket."""
    dtype, shape = DTYPES.get(place.dtype), place.shape
    part = payload[place.offset : place.offset + place.nbytes]
    if dtype is None or part.nbytes != place.nbytes or math.prod(shape) * dtype.itemsize != place.nbytes:
        raise WeightSyncError(f"tensor '{place.name}' ({place.dtype}, shape {shape}) does not fit its bucket")
    return part.view(dtype).view(shape)


def _compare(received: TensorList, announced: TensorList) -> None:
    """Raise ``WeightSyncError`` that names the tensors in which two lists differ."""
    arrived, sent = (
        {place.name: (place, digest) for place, digest in zip(part.places, part.digests, strict=True)}
        for part in (received, announced)
    )
    for problem, names in (
        ("did not arrive", sent.keys() - arrived.keys()),
        ("arrived but is not in the manifest", arrived.keys() - sent.keys()),
        ("differs from the manifest", {name for name in arrived.keys() & sent.keys() if arrived[name] != sent[name]}),
    ):
        if names:
            raise WeightSyncError(f"tensor {problem}: {listed(names)}")
