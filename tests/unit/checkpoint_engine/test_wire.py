"""Records survive the wire, and no difference between what was sent and what is held goes unnoticed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint_engine.plan import ALIGNMENT, plan_buckets
from megarl.checkpoint_engine.wire import Manifest, Receipt, TensorMeta, metas_from_bytes, metas_to_bytes
from megarl.errors import WeightSyncError

META = TensorMeta("a.lora_A.weight", "bfloat16", (4, 8), 0, 0, 64, "0123456789abcdef")
MANIFEST = Manifest(3, "adapter", (META, replace(META, name="b.lora_A.weight", offset=64)), {"r": 4})


def receipt(manifest: Manifest) -> Receipt:
    return Receipt(manifest.version, manifest.kind, 0, len(manifest.tensors), manifest.nbytes, manifest.checksum)


def test_records_survive_the_wire() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert metas_from_bytes(metas_to_bytes(MANIFEST.tensors)) == MANIFEST.tensors
    assert Receipt.from_bytes(receipt(MANIFEST).to_bytes()) == receipt(MANIFEST)


@pytest.mark.parametrize(
    "change", [{"name": "c"}, {"dtype": "float16"}, {"shape": (8, 4)}, {"digest": "f123456789abcdef"}]
)
def test_the_checksum_covers_every_tensors_name_dtype_shape_and_bytes(change: dict) -> None:
    changed = replace(MANIFEST, tensors=(replace(META, **change), MANIFEST.tensors[1]))
    assert changed.checksum != MANIFEST.checksum
    with pytest.raises(WeightSyncError, match="checksum"):
        receipt(changed).check(MANIFEST)


def test_the_checksum_covers_order_and_the_adapters_config() -> None:
    assert replace(MANIFEST, tensors=MANIFEST.tensors[::-1]).checksum != MANIFEST.checksum
    assert replace(MANIFEST, adapter_config={"r": 8}).checksum != MANIFEST.checksum


@pytest.mark.parametrize("change", [{"version": 4}, {"kind": "base"}, {"count": 1}, {"nbytes": 0}, {"checksum": ""}])
def test_a_receipt_that_differs_is_refused_by_field(change: dict) -> None:
    with pytest.raises(WeightSyncError, match=f"receiver 0 holds {next(iter(change))}"):
        replace(receipt(MANIFEST), **change).check(MANIFEST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, "adapter", (META,), {}), "version is -1"),
        ((True, "adapter", (META,), {}), "version is True"),
        ((0, "delta", (META,), {}), "kind is 'delta'"),
        ((0, "adapter", (), {}), "holds no tensor"),
        ((0, "adapter", (META, META), {}), "holds twice: 'a.lora_A.weight'"),
        ((0, "adapter", (META,), None), "adapter_config"),
        ((0, "base", (META,), {}), "adapter_config"),
    ],
)
def test_an_impossible_manifest_cannot_be_made(arguments: tuple, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        Manifest(*arguments)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"tensors": 3}', b'{"tensors": [{"name": "a"}]}', b"\xff"])
def test_a_malformed_record_is_a_sync_error(data: bytes) -> None:
    for parse in (Manifest.from_bytes, Receipt.from_bytes):
        with pytest.raises(WeightSyncError, match="malformed"):
            parse(data)


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
