# SPDX-License-Identifier: Apache-2.0
"""Read rows by the package ``datasets``: from a folder of ``save_to_disk``, or a data set on the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, nearest


def read_dataset(folder: Path | None, source: str, split: str, subset: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one split.

    Args:
        folder: written by ``save_to_disk``; None: ``source`` is a hub id.
        source: the value of ``task.path``, for messages.
        split: its name.
        subset: configuration of a hub data set that has several.

    Raises:
        ConfigError: ``datasets`` is not installed, no such split, or the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"task.path is '{source}', which the package 'datasets' reads; install it: pip install datasets"
        ) from error
    try:
        if folder is None:
            loaded: Any = datasets.load_dataset(source, subset, split=split)
        else:
            loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a library raises: network, access, a missing split, a damaged file
        fix = "save it there with datasets.save_to_disk" if folder else "check the id, the network and access to it"
        raise ConfigError(
            f"task.path is '{source}' with split '{split}', which cannot be loaded; {fix}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ConfigError(
                f"task.options.split is '{split}', but '{source}' has no such split{nearest(split, loaded)} "
                f"(it has: {', '.join(loaded)})"
            )
        loaded = loaded[split]
    return iter(loaded)
