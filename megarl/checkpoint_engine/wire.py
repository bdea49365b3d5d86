# SPDX-License-Identifier: Apache-2.0
"""Describe lists of tensors to both ends of a weight transfer, and encode them as bytes.

A transfer is a sequence of buckets followed by one manifest. Every tensor has its own digest, so that an error can name
the tensor. The checksum of a whole transfer covers names, dtypes, shapes and digests in sending order. An adapter of a
mixture has tens of thousands of tensors, so at every sync only their digests are computed and sent; the rest is encoded
once, and sent once per connection (``Book``).
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Self, get_args

import xxhash

from megarl.errors import WeightSyncError

# merged: base plus adapter of the blocks that the adapter changes, for an engine without LoRA.
Kind = Literal["adapter", "base", "merged"]
KINDS: tuple[str, ...] = get_args(Kind)

# Bytes of a tensor's digest.
DIGEST = 8
# Bytes of a blob's key in a ``Book``: its xxh3-128.
KEY = 16
# Number of buckets whose parsed places are cached: more than a run's base and adapter have together.
CACHED = 4096


class Place(NamedTuple):
    """Location and properties of one tensor, or of some rows of a large one; the same at every sync of a run.

    Attributes:
        name: PEFT's on-disk name (adapter) or the Hugging Face name (base, merged).
        dtype: torch's name of the dtype, without the module (``"bfloat16"``).
        shape: full, unsharded shape.
        bucket: index of the bucket that holds it.
        offset: byte offset in that bucket.
        nbytes: size in bytes, of these rows.
        start: byte offset of the first of these rows in the tensor; 0 for a whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    start: int = 0

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"{self.name} from byte {self.start}" if self.start else self.name


@dataclass(frozen=True)
class Blob:
    """Bytes that travel once per connection; ``key`` is their xxh3-128."""

    data: bytes

    @cached_property
    def key(self) -> bytes:
        """Equal for equal bytes."""
        return _key_of(self.data)


class Places(tuple[Place, ...]):
    """Places in order. Every sync uses them again, so what follows from them is worked out once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.nbytes for place in self)

    @cached_property
    def tensors(self) -> int:
        """Number of tensors that begin here."""
        return sum(not place.start for place in self)

    @cached_property
    def end(self) -> int:
        """Bytes of a bucket that has these places."""
        return max(place.offset + place.nbytes for place in self)

    @cached_property
    def repeated(self) -> list[str]:
        """Names that more than one tensor has."""
        names = Counter(place.label for place in self)
        return [name for name, count in names.items() if count > 1]

    @cached_property
    def blob(self) -> Blob:
        """The places as JSON."""
        return Blob(encode(self))

    @cached_property
    def identity(self) -> bytes:
        """The part of the places that a checksum covers; the division into buckets is not in it."""
        return encode([[*place[:3], place.start] for place in self])

    @cached_property
    def buckets(self) -> "tuple[Places, ...]":
        """The places of each bucket."""
        found: list[list[Place]] = []
        for place in self:
            while len(found) <= place.bucket:
                found.append([])
            found[place.bucket].append(place)
        return tuple(Places(bucket) for bucket in found)


@lru_cache(maxsize=CACHED)
def known(places: Places) -> Places:
    """Return the first object that was equal, with all that was worked out of it."""
    return places


@lru_cache(maxsize=CACHED)
def together(parts: tuple[Places, ...]) -> Places:
    """Return the places of all buckets, in order."""
    return parts[0] if len(parts) == 1 else Places(place for part in parts for place in part)


class Book:
    """Blobs that both ends of a connection know, so that each travels once per connection.

    Sender and receivers have one each. Messages must arrive in the order in which they were packed.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def pack(self, blob: Blob) -> bytes:
        """Return the blob's key, and the blob itself the first time."""
        data = b"" if blob.key in self._known else blob.data
        self._known.setdefault(blob.key, blob.data)
        return b"".join((blob.key, len(data).to_bytes(8, "little"), data))

    def unpack(self, data: bytes) -> tuple[bytes, bytes]:
        """Split the result of ``pack`` from what follows it: (blob, rest). Raises ``WeightSyncError`` if malformed."""
        key, size, rest = data[:KEY], int.from_bytes(data[KEY : KEY + 8], "little"), data[KEY + 8 :]
        if size:
            blob, rest = rest[:size], rest[size:]
            if len(blob) != size or _key_of(blob) != key:
                raise WeightSyncError("malformed message: a part is damaged")
            self._known[key] = blob
        if key not in self._known:
            raise WeightSyncError("malformed message: it names a part that never came")
        return self._known[key], rest


@dataclass(frozen=True)
class TensorList:
    """The tensors of a bucket or of a transfer, in sending order.

    On the wire the places come before the digests. They are encoded and parsed once per process, however many syncs use
    them.

    Attributes:
        places: one place per tensor.
        digests: 64 bits of each tensor's bytes, ``DIGEST`` bytes each, one after the other (``digests``); empty in a
            bucket whose digests are still being formed.
    """

    places: Places
    digests: bytes

    @property
    def count(self) -> int:
        """Number of tensors; the parts of a large one count once."""
        return self.places.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.places.nbytes

    def checksum(self, adapter_config: dict[str, Any] | None = None) -> str:
        """Return xxh3-128 over name, dtype, shape and digest of the tensors in order, and over the adapter's config."""
        state = xxhash.xxh3_128(encode(adapter_config))
        state.update(self.places.identity)
        state.update(self.digests)
        return state.hexdigest()

    def by_name(self) -> dict[str, tuple[Place, bytes]]:
        """Map each tensor's name to its place and digest."""
        cut = (self.digests[start : start + DIGEST] for start in range(0, len(self.digests), DIGEST))
        return {place.label: (place, digest) for place, digest in zip(self.places, cut, strict=True)}

    def to_bytes(self, book: Book) -> bytes:
        """Return the places, as a part that travels once, and the digests."""
        return book.pack(self.places.blob) + self.digests

    @classmethod
    def from_bytes(cls, data: bytes, book: Book) -> Self:
        """Parse the result of ``to_bytes``. Raises ``WeightSyncError`` if it is malformed."""
        head, digests = book.unpack(data)
        try:
            places = _decode_places(head)
        except (ValueError, TypeError) as error:
            raise WeightSyncError(f"malformed list of tensors: {error!r}") from error
        if digests and len(digests) != DIGEST * len(places):
            raise WeightSyncError(f"malformed list of tensors: {len(digests)} bytes of digests, {len(places)} tensors")
        return cls(places, digests)


@dataclass(frozen=True)
class Plan:
    """The tensors and the config of an adapter; the same at every sync until the config changes.

    Attributes:
        places: all tensors, in sending order; names are unique.
        adapter_config: PEFT's ``adapter_config.json``.
    """

    places: Places
    adapter_config: dict[str, Any]

    def __post_init__(self) -> None:
        check_names("adapter", self.places)

    @property
    def key(self) -> bytes:
        """Equal for equal plans."""
        return self.blob.key

    @cached_property
    def blob(self) -> Blob:
        """A line of JSON for the config, and one for the places."""
        return Blob(encode(self.adapter_config) + b"\n" + self.places.blob.data)

    @classmethod
    @lru_cache(maxsize=16)
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the bytes of ``blob``; equal bytes give the same object."""
        config, _, places = data.partition(b"\n")
        try:
            return cls(_decode_places(places), decode(config, "plan"))
        except (ValueError, TypeError) as error:
            raise WeightSyncError(f"malformed plan: {error!r}") from error


def check_names(what: str, places: Places) -> None:
    """Raise ``WeightSyncError`` unless there is a tensor, and no two of one name; ``what`` begins the message."""
    if not places:
        raise WeightSyncError(f"the {what} holds no tensor; nothing was exported")
    if places.repeated:
        raise WeightSyncError(f"the {what} holds twice: {listed(places.repeated)}")


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first few names in order, quoted, and the number of the others; for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(f"'{name}'" for name in ordered[:most]) + more


def _key_of(blob: bytes) -> bytes:
    return xxhash.xxh3_128_digest(blob)


@lru_cache(maxsize=CACHED)
def _decode_places(data: bytes) -> Places:
    return Places(
        Place(name, dtype, tuple(shape), bucket, offset, nbytes, start)
        for name, dtype, shape, bucket, offset, nbytes, start in json.loads(data)
    )


def encode(tree: Any) -> bytes:
    """Encode as compact JSON with sorted keys, so that equal trees have equal bytes."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes, record: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise WeightSyncError(f"malformed {record}: {error}") from error
    if not isinstance(tree, dict):
        raise WeightSyncError(f"malformed {record}: a JSON object was expected")
    return tree
