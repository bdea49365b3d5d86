# SPDX-License-Identifier: Apache-2.0
"""Turn tensors into buckets and back, over any transport. Both ends compute digests from the bytes themselves."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from megarl.checkpoint_engine.base import Receiver, Sender
from megarl.checkpoint_engine.buckets.digests import begin_digests
from megarl.checkpoint_engine.buckets.filling import (
    Filler,
    Filling,
    Named,
    as_planned,
    as_they_come,
    check_fit,
    shape_of,
    tensor_bytes,
    view_of,
)
from megarl.checkpoint_engine.buckets.host_copies import bring_early
from megarl.checkpoint_engine.buckets.stages import Stages
from megarl.checkpoint_engine.records import Bucket, Manifest, Receipt
from megarl.checkpoint_engine.wire import DIGEST, Book, Kind, Place, Places, Plan, TensorList, listed, together
from megarl.errors import WeightSyncError

# Buckets whose kernels a GPU may still be running when the next one is taken: their results are not waited for.
BEHIND = 2

# The places of a bucket, and what returns their digests as soon as the device has formed them.
Part = tuple[Places, Callable[[], bytes]]


class Once:
    """Digests that are waited for at the first call. What they are formed from is released then."""

    def __init__(self, form: Callable[[], bytes]) -> None:
        self._form: Callable[[], bytes] | None = form
        self._formed = b""

    def __call__(self) -> bytes:
        """Return the digests."""
        if self._form is not None:
            self._formed, self._form = self._form(), None
        return self._formed


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
        if sender.reuses_buffers:
            sender.forget = self._filler.forget
        # Of each kind the tensors that were sent last, if they are kept, their plan, and the buckets that they fill.
        self._kept: dict[Kind, tuple[Iterable[Named], Plan | None, list[Filling]]] = {}

    def send(self, tensors: Iterable[Named], version: int, kind: Kind, plan: Plan | None = None) -> Manifest:
        """Send a stream of full tensors and its manifest.

        Args:
            tensors: (name, tensor) pairs on any device; float32, float16 or bfloat16; deferred or not. Consumed bucket
                by bucket. A tuple is kept: if the same one comes again, it is not looked through once more.
            version: policy version.
            kind: ``"adapter"``, ``"base"`` or ``"merged"``.
            plan: for adapters what ``tensors`` will be, else None.

        Returns:
            The manifest that was sent.

        Raises:
            WeightSyncError: a dtype cannot be sent, the tensors are not those of the plan, or the transport failed.
        """
        parts: list[Part] = []
        on_gpu = False
        for filling in self._fillings(tensors, kind, plan):
            self.stages.end("export")
            payload = self.sender.buffer(filling.places.end)
            self.stages.end("wire")
            digests = Once(self._filler.fill(payload, filling))
            self.stages.end("gather")
            # A GPU forms them while the next bucket is prepared; the manifest brings them.
            on_gpu = payload.is_cuda
            ready = b"" if on_gpu else digests()
            parts.append((filling.places, digests))
            del filling
            self.stages.end("hash")
            bucket = Bucket(version, kind, TensorList(parts[-1][0], ready), plan)
            self.sender.put(bucket.to_bytes(self._book), payload)
            self.stages.end("wire")
        if on_gpu:
            bring_early()
            # The last bucket is full; it may still be on its way when the manifest is made.
            self.sender.settle(torch.cuda.current_stream().record_event())
        self.stages.end("wire")
        manifest = Manifest(version, kind, joined(parts), plan.adapter_config if plan else None)
        self.stages.end("hash")
        self.sender.end(manifest.to_bytes(self._book))
        if on_gpu:
            self.sender.settle()
        return manifest

    def _fillings(self, tensors: Iterable[Named], kind: Kind, plan: Plan | None) -> Iterable[Filling]:
        """Return the buckets with their tensors, those of the plan if there is one."""

        def new() -> Iterator[Filling]:
            return as_planned(tensors, plan) if plan else as_they_come(tensors, self._limit, split=True)

        if not isinstance(tensors, tuple):
            return new()
        kept = self._kept.get(kind)
        if kept is None or kept[0] is not tensors or kept[1] is not plan:
            kept = self._kept[kind] = tensors, plan, list(new())
        return kept[2]


class Inbox:
    """The receiving end of one transfer: iterate over ``buckets`` or ``tensors``, then call ``finish``.

    Args:
        receiver: open receiver.
        index: its index, for messages and the receipt.
        book: what the connection's messages may name.
    """

    def __init__(self, receiver: Receiver, index: int, book: Book) -> None:
        self._receiver, self._index, self._book = receiver, index, book
        self._parts: list[Part] = []
        self._manifest: Manifest | None = None
        self._on_gpu = False
        self.stages = Stages()

    def buckets(
        self, begin: Callable[[torch.Tensor, Places], Callable[[], bytes]] = begin_digests
    ) -> Iterator[tuple[Bucket, torch.Tensor, Callable[[], object]]]:
        """Yield each bucket's header, its bytes, ``[nbytes]`` uint8, and what raises if they are not those sent.

        The digests are being formed when a bucket is yielded. Those of a bucket in host memory are compared before the
        next bucket; whoever wants to know earlier calls the check. Those of one on a GPU are compared by ``finish``.
        All that is outstanding on the current stream (``host_copies``) is on its way to the host before the next one.

        Args:
            begin: begins to form the digests of a bucket's bytes. It may do more with them on the way.

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
            self._on_gpu = payload.is_cuda
            digests = Once(begin(payload, places))
            self._parts.append((places, digests))
            self.stages.end("hash")
            verify = cache(_check_of(digests, bucket.tensors, payload.is_cuda))
            yield bucket, payload, verify
            verify()
            bring_early()
            if len(self._parts) > BEHIND:
                # While the next bucket is on its way; at the end all of them would take a millisecond or more.
                self._parts[-1 - BEHIND][1]()
            self.stages.end("load")

    def tensors(self) -> Iterator[Named]:
        """Yield ``(name, tensor)``. Each tensor is a view of its bucket, or a copy if the bucket will be used again.

        A tensor that came in several buckets is put together.
        """
        whole: torch.Tensor | None = None
        for bucket, payload, verify in self.buckets():
            verify()
            self.stages.end("hash")
            for place in bucket.tensors.places:
                view = view_of(payload, place)
                if shape_of(place) == place.shape:
                    yield place.name, view.clone() if self._receiver.reuses_buffers else view
                    continue
                whole = view.new_empty(place.shape) if whole is None else whole
                _put_rows(whole, view, place)
                if place.start + place.nbytes == tensor_bytes(place):
                    yield place.name, whole
                    whole = None

    def finish(self) -> tuple[Manifest, Receipt]:
        """Compare the received tensors with the manifest.

        Returns:
            The manifest, and the receipt computed from the received bytes.

        Raises:
            WeightSyncError: tensors are missing, unexpected, damaged or different; the message names them.
        """
        if self._manifest is None:
            raise WeightSyncError("the transfer was not read to its end")
        sent, checksum = self._manifest, self._manifest.checksum  # while a GPU still works
        if self._on_gpu:
            self._receiver.settle()
        self.stages.end("load")
        arrived = joined(self._parts)
        self.stages.end("hash")
        if (arrived.digests, arrived.places.identity) != (sent.tensors.digests, sent.tensors.places.identity):
            _compare(arrived, sent.tensors)
            checksum = arrived.checksum(sent.adapter_config)
        self.stages.end("check")
        seconds = self.stages.seconds
        receipt = Receipt(sent.version, sent.kind, self._index, arrived.count, arrived.nbytes, checksum, seconds)
        receipt.check(sent.receipt)
        return sent, receipt


def plan_of(tensors: Iterable[Named], adapter_config: dict[str, Any], bucket_bytes: int) -> Plan:
    """Plan the buckets of an adapter from its names, shapes and dtypes. The tensors' values are not read."""
    places = [place for filling in as_they_come(tensors, bucket_bytes, split=False) for place in filling.places]
    # As it is after it has travelled, so that both ends have equal plans.
    return Plan(Places(places), json.loads(json.dumps(adapter_config)))


def joined(parts: list[Part]) -> TensorList:
    """Return the tensors of all buckets, in order. Waits for their digests."""
    return TensorList(together(tuple(places for places, _ in parts)), b"".join(digests() for _, digests in parts))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no value is NaN or infinite. One pass over the bytes; ``isfinite`` on a CPU makes several."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


def _check_of(digests: Callable[[], bytes], sent: TensorList, later: bool) -> Callable[[], object]:
    """Return what raises if a bucket arrived damaged; it does nothing if that is found out later.

    Args:
        digests: those of what arrived.
        sent: the bucket's tensors; with digests, or without if a device was still forming them.
        later: True if ``finish`` may still ask for ``digests``; else the bucket's memory will be used again.
    """

    def check() -> None:
        if (actual := digests()) != sent.digests:
            damaged = [place.name for place, at in _cut(sent.places) if actual[at] != sent.digests[at]]
            raise WeightSyncError(f"tensor {listed(damaged)} arrived damaged: its digest is not the one sent")

    if sent.digests:
        return check
    return (lambda: None) if later else digests


def _put_rows(whole: torch.Tensor, rows: torch.Tensor, place: Place) -> None:
    """Copy a place's rows into their tensor."""
    first = place.start * place.shape[0] // tensor_bytes(place)
    whole[first : first + len(rows)] = rows


def _cut(places: Places) -> Iterator[tuple[Place, slice]]:
    """Yield each place with its part of the digests."""
    for number, place in enumerate(places):
        yield place, slice(number * DIGEST, (number + 1) * DIGEST)


def _compare(received: TensorList, announced: TensorList) -> None:
    """Raise ``WeightSyncError`` that names the tensors in which two lists differ."""
    arrived, sent = received.by_name(), announced.by_name()
    both = arrived.keys() & sent.keys()
    for problem, names in (
        ("did not arrive", sent.keys() - arrived.keys()),
        ("arrived but is not in the manifest", arrived.keys() - sent.keys()),
        (
            "arrived damaged: its digest is not the one sent",
            {name for name in both if arrived[name][0] == sent[name][0] and arrived[name] != sent[name]},
        ),
        ("differs from the manifest", {name for name in both if arrived[name] != sent[name]}),
    ):
        if names:
            raise WeightSyncError(f"tensor {problem}: {listed(names)}")
