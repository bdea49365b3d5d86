# SPDX-License-Identifier: Apache-2.0
"""Turn tensors into buckets and back, over any transport. Both ends compute digests from the bytes themselves."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

import torch

from megarl.checkpoint_engine.base import Receiver, Sender
from megarl.checkpoint_engine.digests import begin_digests
from megarl.checkpoint_engine.filling import DTYPES, Filler, Filling, view_of
from megarl.checkpoint_engine.plan import plan_buckets
from megarl.checkpoint_engine.records import Bucket, Manifest, Receipt
from megarl.checkpoint_engine.wire import DIGEST, Book, Kind, Place, Places, Plan, TensorList, known, listed, together
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]


class Stages:
    """Wall seconds of the stages of one transfer. On a GPU a stage that does not wait ends in the next that does."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def begin(self) -> None:
        """Forget all stages; the first begins."""
        self.seconds, self._last = {}, time.perf_counter()

    def end(self, stage: str) -> None:
        """End a stage, and begin the next."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


class Outbox:
    """The sending end of a connection.

    Args:
        sender: open sender.
        bucket_bytes: limit of one bucket in bytes.
    """

    def __init__(self, sender: Sender, bucket_bytes: int) -> None:
        self.sender, self._limit, self._book = sender, bucket_bytes, Book()
        self.stages = Stages()
        self._filler = Filler(keeps=sender.reuses_buffers)
        # The tensors that were sent last, if they are kept, their plan, and the buckets that they fill.
        self._kept: tuple[Iterable[Named], Plan, list[Filling]] | None = None

    def send(self, tensors: Iterable[Named], version: int, kind: Kind, plan: Plan | None = None) -> Manifest:
        """Send a stream of full tensors and its manifest.

        Args:
            tensors: (name, tensor) pairs on any device; float32, float16 or bfloat16. Consumed bucket by bucket. A
                tuple is kept: if the same one comes again, it is not looked through once more.
            version: policy version.
            kind: ``"adapter"``, ``"base"`` or ``"merged"``.
            plan: for adapters what ``tensors`` will be, else None.

        Returns:
            The manifest that was sent.

        Raises:
            WeightSyncError: a dtype cannot be sent, the tensors are not those of the plan, or the transport failed.
        """
        parts: list[TensorList] = []
        for filling in self._planned(tensors, plan) if plan else _as_they_come(tensors, self._limit):
            self.stages.end("export")
            payload = self.sender.buffer(filling.places.end)
            self.stages.end("wire")
            digests = self._filler.fill(payload, filling)
            self.stages.end("gather")
            parts.append(TensorList(filling.places, digests()))
            del filling
            self.stages.end("hash")
            self.sender.put(Bucket(version, kind, parts[-1], plan).to_bytes(self._book), payload)
            self.stages.end("wire")
        manifest = Manifest(version, kind, joined(parts), plan.adapter_config if plan else None)
        self.sender.end(manifest.to_bytes(self._book))
        return manifest

    def _planned(self, tensors: Iterable[Named], plan: Plan) -> Iterable[Filling]:
        """Return the plan's buckets with their tensors."""
        if not isinstance(tensors, tuple):
            return _as_planned(tensors, plan)
        if self._kept is None or self._kept[0] is not tensors or self._kept[1] is not plan:
            self._kept = tensors, plan, list(_as_planned(tensors, plan))
        return self._kept[2]


class Inbox:
    """The receiving end of one transfer: iterate over ``buckets`` or ``tensors``, then call ``finish``.

    Args:
        receiver: open receiver.
        index: its index, for messages and the receipt.
        book: what the connection's messages may name.
    """

    def __init__(self, receiver: Receiver, index: int, book: Book) -> None:
        self._receiver, self._index, self._book = receiver, index, book
        self._parts: list[TensorList] = []
        self._manifest: Manifest | None = None
        self.stages = Stages()

    def buckets(self) -> Iterator[tuple[Bucket, torch.Tensor, Callable[[], None]]]:
        """Yield each bucket's header, its bytes, ``[nbytes]`` uint8, and what raises if they are not those sent.

        The digests are being formed when a bucket is yielded. Whoever waits for the device anyhow can call the check
        then; it is made before the next bucket in any case.

        Raises:
            WeightSyncError: the transfer failed, or a tensor arrived damaged.
        """
        while True:
            header, payload = self._receiver.take()
            self.stages.end("wire")
            if payload is None:
                self._manifest = Manifest.from_bytes(header, self._book)
                return
            bucket = Bucket.from_bytes(header, self._book)
            places = bucket.tensors.places
            check_fit(places, payload.nbytes)
            verify = cache(partial(_verify, begin_digests(payload, places), bucket.tensors))
            self.stages.end("hash")
            yield bucket, payload, verify
            verify()
            self._parts.append(bucket.tensors)
            self.stages.end("load")

    def tensors(self) -> Iterator[Named]:
        """Yield ``(name, tensor)``. Each tensor is a view of its bucket, or a copy if the bucket will be used again."""
        for bucket, payload, verify in self.buckets():
            verify()
            self.stages.end("hash")
            for place in bucket.tensors.places:
                view = view_of(payload, place)
                yield place.name, view.clone() if self._receiver.reuses_buffers else view

    def finish(self) -> tuple[Manifest, Receipt]:
        """Compare the received tensors with the manifest.

        Returns:
            The manifest, and the receipt computed from the received bytes.

        Raises:
            WeightSyncError: tensors are missing, unexpected or different; the message names them.
        """
        if self._manifest is None:
            raise WeightSyncError("the transfer was not read to its end")
        arrived, sent = joined(self._parts), self._manifest
        checksum = arrived.checksum(sent.adapter_config)
        if checksum != sent.checksum:
            _compare(arrived, sent.tensors)
        self.stages.end("check")
        seconds = self.stages.seconds
        receipt = Receipt(sent.version, sent.kind, self._index, len(arrived), arrived.nbytes, checksum, seconds)
        receipt.check(sent.receipt)
        return sent, receipt


def plan_of(tensors: Iterable[Named], adapter_config: dict[str, Any], bucket_bytes: int) -> Plan:
    """Plan the buckets of an adapter from its names, shapes and dtypes. The tensors' values are not read."""
    places = [place for filling in _as_they_come(tensors, bucket_bytes) for place in filling.places]
    # As it is after it has travelled, so that both ends have equal plans.
    return Plan(Places(places), json.loads(json.dumps(adapter_config)))


def joined(parts: list[TensorList]) -> TensorList:
    """Return the tensors of all buckets, in order."""
    return TensorList(together(tuple(part.places for part in parts)), b"".join(part.digests for part in parts))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. One pass over the bytes; ``isfinite`` on a CPU makes several."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


@lru_cache(maxsize=64)
def check_fit(places: Places, nbytes: int) -> None:
    """Raise ``WeightSyncError`` unless each place lies in a bucket of ``nbytes`` and has the bytes of its shape."""
    for place in places:
        dtype = DTYPES.get(place.dtype)
        end = place.offset + place.nbytes
        if dtype is None or end > nbytes or math.prod(place.shape) * dtype.itemsize != place.nbytes:
            raise WeightSyncError(f"tensor '{place.name}' ({place.dtype}, shape {place.shape}) does not fit its bucket")


def _as_they_come(tensors: Iterable[Named], limit: int) -> Iterator[Filling]:
    """Yield each bucket's places and tensors."""
    for index, bucket in enumerate(plan_buckets(tensors, lambda named: named[1].nbytes, limit)):
        places = Places(_place(name, tensor, index, offset) for (name, tensor), offset in bucket)
        yield Filling(known(places), [tensor for (_, tensor), _ in bucket])


def _as_planned(tensors: Iterable[Named], plan: Plan) -> Iterator[Filling]:
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


def _place(name: str, tensor: torch.Tensor, bucket: int, offset: int) -> Place:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightSyncError(f"tensor '{name}' has dtype {dtype}; weights travel as {', '.join(DTYPES)}")
    return Place(name, dtype, tuple(tensor.shape), bucket, offset, tensor.nbytes)


def _verify(digests: Callable[[], bytes], sent: TensorList) -> None:
    """Raise ``WeightSyncError`` if a tensor arrived damaged."""
    if (actual := digests()) != sent.digests:
        damaged = [place.name for place, at in _cut(sent.places) if actual[at] != sent.digests[at]]
        raise WeightSyncError(f"tensor {listed(damaged)} arrived damaged: its digest is not the one sent")


def _cut(places: Places) -> Iterator[tuple[Place, slice]]:
    """Yield each place with its part of the digests."""
    for number, place in enumerate(places):
        yield place, slice(number * DIGEST, (number + 1) * DIGEST)


def _compare(received: TensorList, announced: TensorList) -> None:
    """Raise ``WeightSyncError`` that names the tensors in which two lists differ."""
    arrived, sent = received.by_name(), announced.by_name()
    for problem, names in (
        ("did not arrive", sent.keys() - arrived.keys()),
        ("arrived but is not in the manifest", arrived.keys() - sent.keys()),
        ("differs from the manifest", {name for name in arrived.keys() & sent.keys() if arrived[name] != sent[name]}),
    ):
        if names:
            raise WeightSyncError(f"tensor {problem}: {listed(names)}")
