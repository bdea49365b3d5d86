# SPDX-License-Identifier: Apache-2.0
"""Check the tensors of PEFT's weights file, before any of them is used."""

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from megarl.errors import AdapterError, nearest
from megarl.lora.files.stacked_experts import AdapterFile
from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE
from megarl.peft.names import BASE_WEIGHT, PREFIX


def check_contents(matrices: AdapterFile, targets: Collection[str], file: Path) -> None:
    """Refuse a file that is not the whole model's adapter and nothing else, in finite numbers.

    Args:
        matrices: the opened file.
        targets: names of the adapted modules.
        file: its path, for messages.

    Raises:
        AdapterError: a tensor is missing or unexpected, or holds a number that is not finite.
    """
    source, expected = matrices.source, {place.file for place in matrices.places.values()}
    check_stored_names(set(source.keys()) - base_weights(targets), expected, file)
    check_finite(((name, source.get_tensor(name)) for name in sorted(expected)), file)


def base_weights(targets: Collection[str]) -> set[str]:
    """Return the names under which PEFT stores the base weights of an adapted embedding or output layer."""
    return {f"{PREFIX}{name}{BASE_WEIGHT}" for name in {EMBED_MODULE, OUTPUT_MODULE}.intersection(targets)}


def check_stored_names(stored: set[str], expected: set[str], file: Path) -> None:
    """Refuse a weights file whose tensors are not those of the adapter.

    Raises:
        AdapterError: a tensor is missing or unexpected; the message names the first.
    """
    if missing := sorted(expected - stored):
        raise AdapterError(f"{file} lacks '{missing[0]}'{nearest(missing[0], stored)} ({len(missing)} tensors missing)")
    if extra := sorted(stored - expected):
        raise AdapterError(f"{file} holds '{extra[0]}', which nothing here uses ({len(extra)} unexpected tensors)")


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], file: Path) -> None:
    """Refuse a weights file with a number that is not finite.

    Args:
        tensors: ``(name, tensor)`` pairs of the file.
        file: its path, for messages.

    Raises:
        AdapterError: the message names the first such tensor.
    """
    for name, tensor in tensors:
        # Much faster than isfinite: if any element is NaN, both bounds are NaN.
        if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor.float())):
            raise AdapterError(
                f"{file}: '{name}' holds a number that is not finite; the file is damaged, or the training diverged"
            )
