# SPDX-License-Identifier: Apache-2.0
"""Copy runs of a bucket's bytes into parameters on a GPU, digest the whole bucket on the way, and read them back."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megarl.checkpoint_engine.buckets.digests import starts_of, sums_of_tensors
from megarl.checkpoint_engine.buckets.filling import DTYPES
from megarl.checkpoint_engine.buckets.host_copies import to_host
from megarl.checkpoint_engine.kernels.ranges import WORD, Range, copy_out, read_back_table, table_of
from megarl.checkpoint_engine.receiver.writers.jobs import Begun, Found, Write
from megarl.checkpoint_engine.wire import Place, Places


class Copies:
    """Ranges of a bucket, each copied into a parameter or only digested. Works on the current stream.

    Args:
        places: the bucket's tensors.
        writes: of each tensor what is written of it.

    Attributes:
        others: the writes that do not copy a run of bytes as it is; they are left to the caller.
    """

    def __init__(self, places: Places, writes: Sequence[Sequence[Write]]) -> None:
        self.others: list[Write] = []
        self._held: set[int] = set()
        ranges, self._names, counts = list[Range](), list[str](), list[int]()
        for place, group in zip(places, writes, strict=True):
            copied = sorted(self._copied(place, group))
            before = len(ranges)
            for begin, end, target in _with_gaps(copied, place.nbytes):
                dtype = DTYPES[place.dtype] if target else None
                ranges.append(Range(place.offset + begin, target, end - begin, begin, dtype))
            counts.append(len(ranges) - before)
            self._names.extend([place.name] * counts[-1])
        device = next(write.target.device for group in writes for write in group)
        self._starts = starts_of(counts)
        # What is held already is read and compared, and not written.
        self._table = table_of([one._replace(target=0) if one.target in self._held else one for one in ranges], device)
        self._back = read_back_table(ranges, self._table)
        self._copied_at = np.asarray([bool(one.target) for one in ranges])
        self._all_copied = bool(self._copied_at.all())

    def run(self, payload: torch.Tensor) -> Begun:
        """See ``BucketWrites.run``."""
        arrived = to_host(copy_out(payload, self._table, self._back))
        return Begun(
            lambda: sums_of_tensors(arrived().numpy()[0], self._starts).tobytes(),
            lambda: self._found(arrived().numpy()),
        )

    def _found(self, result: np.ndarray) -> Found:
        """Return the names behind the kernels' results, int64 ``[3, ranges]``."""
        # What is usual is recognised in a microsecond, as a transfer has a hundred buckets.
        if self._all_copied and not result[2].any() and result[0].tobytes() == result[1].tobytes():
            return Found([], [])
        unlike = (result[0] != result[1]) & self._copied_at
        return Found(*([self._names[i] for i in np.flatnonzero(bad)] for bad in (result[2], unlike)))

    def _copied(self, place: Place, writes: Sequence[Write]) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, address) of the writes that copy a run of the tensor's bytes; keep the others."""
        taken: list[tuple[int, int]] = []
        for write in writes:
            run = _run_of(place, write)
            if run is None or any(run[0] < end and begin < run[1] for begin, end in taken):
                self.others.append(write)
                continue
            taken.append(run)
            if write.held:
                self._held.add(write.target.data_ptr())
            yield *run, write.target.data_ptr()


def _run_of(place: Place, write: Write) -> tuple[int, int] | None:
    """Return begin and end of the bytes, in a tensor, that a write copies as they are; None if it does not."""
    source, target = write.source, write.target
    if source is None or write.scaling != 1.0 or source.dtype != target.dtype or source.shape != tuple(target.shape):
        return None
    rows, columns = source.shape
    if not target.is_contiguous() or source.strides[1] != 1 or (rows > 1 and source.strides[0] != columns):
        return None
    begin = source.offset * source.dtype.itemsize - place.offset
    end = begin + target.nbytes
    if begin % WORD or target.data_ptr() % WORD or (end % WORD and end != place.nbytes) or not target.nbytes:
        return None
    return begin, end


def _with_gaps(copied: list[tuple[int, int, int]], nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs (begin, end, address) in order, and those between and around them with address 0; at least one."""
    done = 0
    for begin, end, target in copied:
        if begin > done:
            yield done, begin, 0
        yield begin, end, target
        done = end
    if done < nbytes or not copied:
        yield done, nbytes, 0
