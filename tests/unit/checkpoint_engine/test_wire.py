# SPDX-License-Identifier: Apache-2.0
"""Check that records survive encoding, and that every difference between what was sent and what is held is found."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint_engine import wire
from megarl.checkpoint_engine.buckets.plan import ALIGNMENT, plan_buckets
from megarl.checkpoint_engine.records import Bucket, Manifest, Receipt
from megarl.checkpoint_engine.wire import KEY, Blob, Book, Place, Places, Plan, TensorList
from megarl.errors import WeightSyncError

PLACE = Place("a.lora_A.weight", "bfloat16", (4, 8), 0, 0, 64)
OTHER = PLACE._replace(name="b.lora_A.weight", offset=64)
DIGEST = b"01234567"
LIST = TensorList(Places((PLACE, OTHER)), DIGEST + DIGEST[::-1])
ONE = TensorList(Places((PLACE,)), DIGEST)
PACKED = LIST.to_bytes(Book())


def packed(data: bytes) -> bytes:
    return Book().pack(Blob(data))


MANIFEST = Manifest(3, "adapter", LIST, {"r": 4})


def receipt(manifest: Manifest) -> Receipt:
    return Receipt(manifest.version, manifest.kind, 0, manifest.tensors.count, manifest.nbytes, manifest.checksum)


def test_records_survive_the_wire() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes(Book()), Book()) == MANIFEST
    assert TensorList.from_bytes(LIST.to_bytes(Book()), Book()) == LIST
    assert [type(place) for place in TensorList.from_bytes(LIST.to_bytes(Book()), Book()).places] == [Place, Place]
    for bucket in (Bucket(3, "base", ONE), Bucket(4, "adapter", ONE, Plan(LIST.places, {"r": 4}))):
        assert Bucket.from_bytes(bucket.to_bytes(Book()), Book()) == bucket
    assert Receipt.from_bytes(receipt(MANIFEST).to_bytes()) == receipt(MANIFEST)


@pytest.mark.parametrize("change", [{"name": "c"}, {"dtype": "float16"}, {"shape": (8, 4)}, {"digest": b"f1234567"}])
def test_the_checksum_covers_every_tensors_name_dtype_shape_and_bytes(change: dict) -> None:
    digests = change.pop("digest", DIGEST) + DIGEST[::-1]
    changed = replace(MANIFEST, tensors=TensorList(Places((PLACE._replace(**change), OTHER)), digests))
    assert changed.checksum != MANIFEST.checksum
    with pytest.raises(WeightSyncError, match="checksum"):
        receipt(changed).check(MANIFEST.receipt)


def test_the_checksum_covers_order_and_the_adapters_config() -> None:
    assert DIGEST[::-1] + DIGEST != LIST.digests[::-1]
    for tensors in (TensorList(Places(LIST.places[::-1]), DIGEST[::-1] + DIGEST), replace(LIST, digests=DIGEST * 2)):
        assert replace(MANIFEST, tensors=tensors).checksum != MANIFEST.checksum
    assert replace(MANIFEST, adapter_config={"r": 8}).checksum != MANIFEST.checksum


@pytest.mark.parametrize("change", [{"version": 4}, {"kind": "base"}, {"count": 1}, {"nbytes": 0}, {"checksum": ""}])
def test_a_receipt_that_differs_is_refused_by_field(change: dict) -> None:
    with pytest.raises(WeightSyncError, match=f"receiver 0 holds {next(iter(change))}"):
        replace(receipt(MANIFEST), **change).check(MANIFEST.receipt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, "adapter", ONE, {}), "version is -1"),
        ((True, "adapter", ONE, {}), "version is True"),
        ((0, "delta", ONE, {}), "kind is 'delta'"),
        ((0, "adapter", TensorList(Places(), b""), {}), "holds no tensor"),
        ((0, "adapter", TensorList(Places((PLACE, PLACE)), DIGEST * 2), {}), "holds twice: 'a.lora_A.weight'"),
        ((0, "adapter", ONE, None), "adapter_config"),
        ((0, "base", ONE, {}), "adapter_config"),
    ],
)
def test_an_impossible_manifest_cannot_be_made(arguments: tuple, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        Manifest(*arguments)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"tensors": 3}', b'{"tensors": [{"name": "a"}]}', b"\xff"])
def test_a_malformed_record_is_a_sync_error(data: bytes) -> None:
    parsers = [Receipt.from_bytes, *(partial(kind.from_bytes, book=Book()) for kind in (Manifest, Bucket))]
    for parse in parsers:
        with pytest.raises(WeightSyncError, match="malformed"):
            parse(data)


@pytest.mark.parametrize(
    "data",
    [b"", PACKED[:30], PACKED[:-1], PACKED + b"0", b"\n" + PACKED, PACKED.replace(b"float", b"fl0at"),
     packed(b"3"), packed(b"[]") + b"0", packed(b"[3]") + b"0" * 8,
     packed(b'[["a", "float32", [1], 0, 0]]') + b"0" * 8],
)  # fmt: skip
def test_a_malformed_list_of_tensors_is_a_sync_error(data: bytes) -> None:
    with pytest.raises(WeightSyncError, match="malformed"):
        TensorList.from_bytes(data, Book())


def test_what_both_ends_know_travels_once_per_connection() -> None:
    ours, theirs = Book(), Book()
    first, second = LIST.to_bytes(ours), replace(LIST, digests=DIGEST * 2).to_bytes(ours)
    assert TensorList.from_bytes(first, theirs) == LIST
    assert TensorList.from_bytes(second, theirs) == replace(LIST, digests=DIGEST * 2)
    assert len(second) == KEY + 8 + 2 * len(DIGEST) < len(first)
    with pytest.raises(WeightSyncError, match="names a part that never came"):
        TensorList.from_bytes(second, Book())


def test_places_are_encoded_and_parsed_once_whatever_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places((PLACE, OTHER))
    wire._decode_places.cache_clear()
    calls = Counter()
    monkeypatch.setattr(wire, "encode", lambda tree, real=wire.encode: calls.update(["encode"]) or real(tree))
    monkeypatch.setattr(wire.json, "loads", lambda data, real=json.loads: calls.update(["parse"]) or real(data))
    for version in range(20):
        part = TensorList(places, version.to_bytes(8, "little") + DIGEST)
        assert TensorList.from_bytes(part.to_bytes(Book()), Book()) == part
    assert calls == {"encode": 1, "parse": 1}


@given(st.lists(st.integers(0, 500), max_size=40), st.integers(1, 700))
def test_buckets_keep_order_and_limit_and_never_overlap(sizes: list[int], limit: int) -> None:
    buckets = list(plan_buckets(enumerate(sizes), lambda item: item[1], limit))
    assert [item for bucket in buckets for item, _ in bucket] == list(enumerate(sizes))
    for bucket in buckets:
        end = 0
        for (_, size), offset in bucket:
            assert offset >= end and offset % ALIGNMENT == 0
            end = offset + size
        assert end <= limit or len(bucket) == 1


def test_buckets_are_lazy() -> None:
    def endless():
        while True:
            yield 10

    assert len(next(plan_buckets(endless(), lambda size: size, 1000))) == 16
