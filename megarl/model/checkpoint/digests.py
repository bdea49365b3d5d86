# SPDX-License-Identifier: Apache-2.0
"""Digest a checkpoint's files and tensors, so that a flipped bit, a cut or a swapped file is refused by name.

This module does not import torch, because the controller checks a checkpoint before it starts anything.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.run_folder import STATE

FORMAT = 3
STATE_DIGEST = "digest"
TENSORS = ".safetensors"
# Bytes per read.
BLOCK = 1 << 24


def seal(folder: Path, state: Mapping[str, Any]) -> str:
    """Return the text of ``state.json``: ``state``, the digests of all other files and tensors, and its own digest.

    Args:
        folder: a checkpoint directory whose other files are all written.
        state: the JSON-able state.

    Raises:
        OSError: a file cannot be read back.
    """
    files = {str(path.relative_to(folder)): digest_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    # Through JSON and back, so that the digest is of what a reader will parse: JSON has no tuples and no integer keys.
    whole = json.loads(json.dumps({**state, "files": files}))
    return json.dumps({**whole, STATE_DIGEST: _digest_tree(whole)}, indent=1) + "\n"


def read_state(folder: Path) -> dict[str, Any]:
    """Parse ``state.json`` and check its digest.

    Raises:
        CheckpointError: the file is missing, is not JSON, was changed, or has another format.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{folder}' is not a complete checkpoint: {STATE}: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        actual = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"checkpoint '{folder}' has format {actual!r} in {STATE}; this megarl reads {FORMAT}")
    if state.pop(STATE_DIGEST, None) != _digest_tree(state):
        raise CheckpointError(f"checkpoint '{folder}' is damaged: {STATE} is not as it was saved (its digest differs)")
    return state


def verify(folder: Path) -> dict[str, Any]:
    """Read the whole checkpoint and compare it with the digests stored when it was saved.

    Returns:
        The parsed ``state.json``.

    Raises:
        CheckpointError: a file or a tensor is missing or differs; the message names it.
    """
    state = read_state(folder)
    for name, saved in state["files"].items():
        try:
            actual = digest_file(folder / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint '{folder}' is damaged: {name} cannot be read ({error})") from error
        if actual != saved:
            raise CheckpointError(f"checkpoint '{folder}' is damaged: {_difference(name, saved, actual)}")
    return state


def digest_file(file: Path) -> dict[str, Any]:
    """Return ``bytes`` and ``sha256`` of a file.

    For a safetensors file ``sha256`` is the header's, and ``tensors`` maps each tensor's name to the digest of its
    bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is safetensors, and its header does not describe its contents.
    """
    with file.open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        if file.suffix != TENSORS:
            return {"bytes": size, "sha256": _digest(handle, size)}
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"its header of {length} bytes does not fit into {size}; it is truncated or damaged")
        header = handle.read(length)
        places = sorted(_tensor_spans(header), key=lambda place: place[1])
        digests, end = {}, 0
        for name, first, last in places:
            if first != end or last < first:
                raise ValueError(f"its header leaves a hole before '{name}'")
            digests[name], end = _digest(handle, last - first), last
        if 8 + length + end != size:
            raise ValueError(f"its header describes {8 + length + end} bytes of {size}; it is truncated or damaged")
    return {"bytes": size, "sha256": hashlib.sha256(header).hexdigest(), "tensors": digests}


def _tensor_spans(header: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield each tensor's name, first byte and end (exclusive), as offsets behind the header."""
    try:
        tree = json.loads(header)
        for name, entry in tree.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, int(first), int(last)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not safetensors': {error}") from error


def _digest(handle: Any, size: int) -> str:
    """Digest the next ``size`` bytes."""
    digest = hashlib.sha256()
    while size:
        block = handle.read(min(size, BLOCK))
        if not block:
            raise ValueError("it ends early; it is truncated")
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def _digest_tree(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _difference(name: str, saved: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Describe the first difference between two results of ``digest_file``."""
    if saved["bytes"] != actual["bytes"]:
        return f"{name} has {actual['bytes']} bytes, and had {saved['bytes']} when it was saved"
    for tensor, digest in saved.get("tensors", {}).items():
        if actual["tensors"].get(tensor, digest) != digest:
            return f"{name}: tensor '{tensor}' is not as it was saved (its digest differs)"
    return f"{name} is not as it was saved (its digest differs)"
