# SPDX-License-Identifier: Apache-2.0
"""Name the files of a contender's ranks."""

from pathlib import Path


def file_of(folder: Path, label: str, rank: int, kind: str) -> Path:
    """Return the file of a rank; that of rank 0 has the label's name alone.

    Args:
        folder: folder of the bench.
        label: name of the measurement.
        rank: the rank.
        kind: ending of the name, without the dot.
    """
    return folder / (f"{label}-rank{rank}.{kind}" if rank else f"{label}.{kind}")
