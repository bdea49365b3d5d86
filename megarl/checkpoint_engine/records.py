# SPDX-License-Identifier: Apache-2.0
"""Define the records of a transfer: the header of a bucket, the sender's manifest, a receiver's receipt."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

from megarl.checkpoint_engine.wire import DIGEST, KINDS, Book, Kind, Plan, TensorList, check_names, decode, encode
from megarl.errors import WeightSyncError

# ``Receipt.receiver`` of the sender itself.
SENDER = -1


@dataclass(frozen=True)
class Bucket:
    """The header of a bucket.

    Attributes:
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        tensors: the tensors of this bucket; without digests if the sender's device still forms them. The manifest has
            them all.
        plan: for adapters what the whole transfer consists of, else None.
    """

    version: int
    kind: Kind
    tensors: TensorList
    plan: Plan | None = None

    def to_bytes(self, book: Book) -> bytes:
        """Return a line of JSON, the plan if there is one, and the tensors."""
        head = encode({"version": self.version, "kind": self.kind, "planned": self.plan is not None}) + b"\n"
        return head + (book.pack(self.plan.blob) if self.plan else b"") + self.tensors.to_bytes(book)

    @classmethod
    def from_bytes(cls, data: bytes, book: Book) -> Self:
        """Parse the result of ``to_bytes``. Raises ``WeightSyncError`` if it is malformed."""
        head, _, rest = data.partition(b"\n")
        tree, plan = decode(head, "bucket"), None
        if tree.get("planned"):
            blob, rest = book.unpack(rest)
            plan = Plan.from_bytes(blob)
        return cls(tree.get("version", -1), tree.get("kind", "?"), TensorList.from_bytes(rest, book), plan)


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
        check_names(f"{self.kind} of version {self.version}", self.tensors.places)
        if len(self.tensors.digests) != DIGEST * len(self.tensors.places):
            raise WeightSyncError(f"the manifest of version {self.version} lacks digests")
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

    @property
    def receipt(self) -> "Receipt":
        """Return the receipt that a receiver of these weights must give; its index is ``SENDER``."""
        return Receipt(self.version, self.kind, SENDER, self.tensors.count, self.nbytes, self.checksum)

    def to_bytes(self, book: Book) -> bytes:
        """Return a line of JSON, and the tensors."""
        head = {"version": self.version, "kind": self.kind, "adapter_config": self.adapter_config}
        return encode(head) + b"\n" + self.tensors.to_bytes(book)

    @classmethod
    def from_bytes(cls, data: bytes, book: Book) -> Self:
        """Parse the result of ``to_bytes``.

        Raises:
            WeightSyncError: it is not JSON, or a field is missing or unknown.
        """
        head, _, tensors = data.partition(b"\n")
        tree = decode(head, "manifest")
        try:
            return cls(tensors=TensorList.from_bytes(tensors, book), **tree)
        except TypeError as error:
            raise WeightSyncError(f"malformed manifest: {error!r}") from error


@dataclass(frozen=True)
class Receipt:
    """Contents of one transfer as a receiver holds them, computed from the received bytes.

    Attributes:
        version: policy version.
        kind: ``"adapter"``, ``"base"`` or ``"merged"``.
        receiver: index of the receiver, 0 .. receivers - 1 over all engines; ``SENDER`` for what was sent.
        count: number of tensors.
        nbytes: bytes of all tensors.
        checksum: checksum of the transfer, as ``Manifest.checksum``.
        seconds: wall seconds of the stages on this side; not compared.
    """

    version: int
    kind: Kind
    receiver: int
    count: int
    nbytes: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    def check(self, sent: "Receipt") -> None:
        """Compare with what was sent.

        Raises:
            WeightSyncError: a field differs; the message names the first one and both values.
        """
        for name in ("version", "kind", "count", "nbytes", "checksum"):
            if (held := getattr(self, name)) != (expected := getattr(sent, name)):
                raise WeightSyncError(
                    f"receiver {self.receiver} holds {name} {held!r}, but {expected!r} was sent "
                    f"({sent.kind} of version {sent.version})"
                )

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return encode(vars(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of ``to_bytes``. Raises ``WeightSyncError`` if it is malformed."""
        tree = decode(data, "receipt")
        if set(tree) != {one.name for one in fields(cls)}:
            raise WeightSyncError(f"malformed receipt: fields {sorted(tree)}")
        return cls(**tree)


def check_sync(version: int, kind: str) -> None:
    """Raise ``WeightSyncError`` unless ``version`` is an integer >= 0 and ``kind`` is known."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise WeightSyncError(f"version is {version!r}; it must be an integer >= 0")
    if kind not in KINDS:
        raise WeightSyncError(f"kind is {kind!r}; known: {', '.join(KINDS)}")
