# SPDX-License-Identifier: Apache-2.0
"""Records that both ends of a weight transfer share, and their JSON form.

A transfer is a sequence of buckets followed by one manifest. Every tensor has its own digest, so that an error can name
the tensor. The checksum of a whole transfer covers names, dtypes, shapes and digests in sending order. An adapter of a
mixture has tens of thousands of tensors, so at every sync only their digests are computed; the rest is encoded once.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Self, get_args

import xxhash

from megarl.errors import WeightSyncError

# merged: base plus adapter of the blocks that the adapter changes, for an engine without LoRA.
Kind = Literal["adapter", "base", "merged"]
KINDS: tuple[str, ...] = get_args(Kind)

# Characters of a tensor's digest.
DIGEST = 16
# Number of buckets whose encoded and parsed places are cached: more than a run's base and adapter have together.
CACHED = 4096


class Place(NamedTuple):
    """Location and properties of one tensor; the same at every sync of a run.

    Attributes:
        name: PEFT's on-disk name (adapter) or the Hugging Face name (base, merged).
        dtype: torch's name of the dtype, without the module (``"bfloat16"``).
        shape: full, unsharded shape.
        bucket: index of the bucket that holds it.
        offset: byte offset in that bucket.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorList:
    """The tensors of a bucket or of a transfer, in sending order.

    On the wire the places come before the digests. They are encoded and parsed once per process, however many syncs use
    them.

    Attributes:
        places: one place per tensor.
        digests: xxh3-64 of each tensor's bytes, 16 hexadecimal digits.
    """

    places: tuple[Place, ...]
    digests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.nbytes for place in self.places)

    def checksum(self, adapter_config: dict[str, Any] | None = None) -> str:
        """Return xxh3-128 over name, dtype, shape and digest of the tensors in order, and over the adapter's config."""
        state = xxhash.xxh3_128(_encode(adapter_config))
        state.update(_identity(self.places))
        state.update("".join(self.digests).encode())
        return state.hexdigest()

    def to_bytes(self) -> bytes:
        """Return a line of JSON and the digests."""
        return _encode_places(self.places) + b"\n" + "".join(self.digests).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of ``to_bytes``. Raises ``WeightSyncError`` if it is malformed."""
        head, _, digests = data.partition(b"\n")
        try:
            places = _decode_places(head)
            text = digests.decode("ascii")
        except (ValueError, TypeError) as error:
            raise WeightSyncError(f"malformed list of tensors: {error!r}") from error
        if len(text) != DIGEST * len(places):
            raise WeightSyncError(
                f"malformed list of tensors: {len(text)} characters of digests for {len(places)} tensors"
            )
        return cls(places, tuple(text[start : start + DIGEST] for start in range(0, len(text), DIGEST)))


@dataclass(frozen=True)
class Manifest:
    """Contents of one transfer as the sender states them. Each receipt is compared with it.

    Attributes:
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        tensors: all tensors; names are unique.
        adapter_config: PEFT's ``adapter_config.json`` for adapters, else None.
    """

    version: int
    kind: Kind
    tensors: TensorList
    adapter_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_sync(self.version, self.kind)
        names = [place.name for place in self.tensors.places]
        if not names:
            raise WeightSyncError(f"the {self.kind} of version {self.version} holds no tensor; nothing was exported")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise WeightSyncError(f"the {self.kind} of version {self.version} holds twice: {listed(twice)}")
        if (self.kind == "adapter") != (self.adapter_config is not None):
            raise WeightSyncError(
                f"a manifest of kind '{self.kind}' must {'' if self.kind == 'adapter' else 'not '}have adapter_config"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors.nbytes

    @cached_property
    def checksum(self) -> str:
        """Digest of names, dtypes, shapes and bytes of all tensors and of the adapter's config."""
        return self.tensors.checksum(self.adapter_config)

    def to_bytes(self) -> bytes:
        """Return a line of JSON, and the tensors."""
        head = {"version": self.version, "kind": self.kind, "adapter_config": self.adapter_config}
        return _encode(head) + b"\n" + self.tensors.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of ``to_bytes``.

        Raises:
            WeightSyncError: it is not JSON, or a field is missing or unknown.
        """
        head, _, tensors = data.partition(b"\n")
        tree = _decode(head, "manifest")
        try:
            return cls(tensors=TensorList.from_bytes(tensors), **tree)
        except TypeError as error:
            raise WeightSyncError(f"malformed manifest: {error!r}") from error


@dataclass(frozen=True)
class Receipt:
    """Contents of one transfer as a receiver holds them, computed from the received bytes.

    Attributes:
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        receiver: index of the receiver, 0 .. receivers - 1 over all engines.
        count: number of tensors.
        nbytes: bytes of all tensors.
        checksum: checksum of the transfer, as ``Manifest.checksum``.
    """

    version: int
    kind: Kind
    receiver: int
    count: int
    nbytes: int
    checksum: str

    def check(self, manifest: Manifest) -> None:
        """Compare with what was sent.

        Raises:
            WeightSyncError: a field differs; the message names the first one and both values.
        """
        for field, sent in (
            ("version", manifest.version),
            ("kind", manifest.kind),
            ("count", len(manifest.tensors)),
            ("nbytes", manifest.nbytes),
            ("checksum", manifest.checksum),
        ):
            if getattr(self, field) != sent:
                raise WeightSyncError(
                    f"receiver {self.receiver} holds {field} {getattr(self, field)!r}, but {sent!r} was sent "
                    f"({manifest.kind} of version {manifest.version})"
                )

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return _encode(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of ``to_bytes``. Raises ``WeightSyncError`` if it is malformed."""
        tree = _decode(data, "receipt")
        if set(tree) != {field.name for field in fields(cls)}:
            raise WeightSyncError(f"malformed receipt: fields {sorted(tree)}")
        return cls(**tree)


def check_sync(version: int, kind: str) -> None:
    """Raise ``WeightSyncError`` unless ``version`` is an integer >= 0 and ``kind`` is known."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise WeightSyncError(f"version is {version!r}; it must be an integer >= 0")
    if kind not in KINDS:
        raise WeightSyncError(f"kind is {kind!r}; known: {', '.join(KINDS)}")


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first few names in order, quoted, and the number of the others; for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(f"'{name}'" for name in ordered[:most]) + more


@lru_cache(maxsize=CACHED)
def _encode_places(places: tuple[Place, ...]) -> bytes:
    return _encode(places)


@lru_cache(maxsize=CACHED)
def _decode_places(data: bytes) -> tuple[Place, ...]:
    return tuple(
        Place(name, dtype, tuple(shape), bucket, offset, nbytes)
        for name, dtype, shape, bucket, offset, nbytes in json.loads(data)
    )


@lru_cache(maxsize=CACHED)
def _identity(places: tuple[Place, ...]) -> bytes:
    """Return the part of the places that a checksum covers; the division into buckets is not in it."""
    return _encode([place[:3] for place in places])


def _encode(tree: Any) -> bytes:
    """Encode as compact JSON with sorted keys, so that equal trees have equal bytes."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _decode(data: bytes, record: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise WeightSyncError(f"malformed {record}: {error}") from error
    if not isinstance(tree, dict):
        raise WeightSyncError(f"malformed {record}: a JSON object was expected")
    return tree
