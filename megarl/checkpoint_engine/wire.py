"""Records that both ends of a weight transfer share, and their JSON form.

A transfer is a sequence of buckets followed by one manifest. Every tensor carries its own digest, so that an error can
name the tensor; the checksum of a whole transfer covers names, dtypes, shapes and digests in sending order.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

import xxhash

from megarl.errors import WeightSyncError

Kind = Literal["adapter", "base"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class TensorMeta:
    """Where one tensor lies and what it must be.

    Attributes:
        name: PEFT's on-disk name (adapter) or the Hugging Face name (base).
        dtype: torch's name of it, without the module (``"bfloat16"``).
        shape: full, unsharded shape.
        bucket: index of the bucket that holds it.
        offset: byte offset in that bucket.
        nbytes: bytes.
        digest: xxh3-64 of the bytes, hexadecimal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything that one transfer holds; the sender's word, against which each receiver's is compared.

    Attributes:
        version: policy version.
        kind: ``"adapter"`` or ``"base"``.
        tensors: in sending order, names unique.
        adapter_config: PEFT's ``adapter_config.json`` (adapters), else None.
    """

    version: int
    kind: Kind
    tensors: tuple[TensorMeta, ...]
    adapter_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_sync(self.version, self.kind)
        names = [meta.name for meta in self.tensors]
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
        return sum(meta.nbytes for meta in self.tensors)

    @property
    def checksum(self) -> str:
        """Digest of names, dtypes, shapes and bytes of all tensors and of the adapter's config."""
        return checksum(self.tensors, self.adapter_config)

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return _encode(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse ``to_bytes``'s form.

        Raises:
            WeightSyncError: not JSON, a field missing or unknown.
        """
        tree = _decode(data, "manifest")
        try:
            metas = tuple(_meta(entry) for entry in tree.pop("tensors"))
            return cls(tensors=metas, **tree)
        except (KeyError, TypeError, AttributeError) as error:
            raise WeightSyncError(f"malformed manifest: {error!r}") from error


@dataclass(frozen=True)
class Receipt:
    """What one receiver really holds, computed from the bytes that arrived.

    Attributes:
        version: policy version.
        kind: ``"adapter"`` or ``"base"``.
        receiver: index of the receiver, 0 .. receivers - 1 over all engines.
        count: number of tensors.
        nbytes: bytes of all tensors.
        checksum: as ``Manifest.checksum``.
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
            WeightSyncError: naming the first field that differs, and both values.
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
        """Parse ``to_bytes``'s form; raises ``WeightSyncError`` where it is malformed."""
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
    """The first few names in order, quoted, and how many more there are; for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(f"'{name}'" for name in ordered[:most]) + more


def checksum(metas: Sequence[TensorMeta], adapter_config: dict[str, Any] | None = None) -> str:
    """xxh3-128 over name, dtype, shape and digest of each tensor in order, and the adapter's config."""
    state = xxhash.xxh3_128(_encode(adapter_config))
    for meta in metas:
        state.update(_encode([meta.name, meta.dtype, meta.shape, meta.digest]))
    return state.hexdigest()


def metas_to_bytes(metas: Sequence[TensorMeta]) -> bytes:
    """JSON form of one bucket's contents."""
    return _encode([asdict(meta) for meta in metas])


def metas_from_bytes(data: bytes) -> tuple[TensorMeta, ...]:
    """Parse ``metas_to_bytes``'s form; raises ``WeightSyncError`` where it is malformed."""
    try:
        return tuple(_meta(entry) for entry in json.loads(data))
    except (ValueError, TypeError, KeyError) as error:
        raise WeightSyncError(f"malformed bucket header: {error!r}") from error


def _meta(entry: dict[str, Any]) -> TensorMeta:
    """One ``TensorMeta`` from its JSON form."""
    return TensorMeta(**{**entry, "shape": tuple(entry["shape"])})


def _encode(tree: Any) -> bytes:
    """Compact JSON with sorted keys: equal trees have equal bytes."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _decode(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise WeightSyncError(f"malformed {what}: {error}") from error
    if not isinstance(tree, dict):
        raise WeightSyncError(f"malformed {what}: a JSON object was expected")
    return tree
