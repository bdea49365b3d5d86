# SPDX-License-Identifier: Apache-2.0
"""Check values on a GPU without making the host wait for them.

A check reads a few flags. If the host waited for them in the middle of a step, the GPU would stand still until the next
kernels are launched. Within ``late_checks`` flags of a GPU are copied to pinned memory and read at the end.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from megarl.cuda_memory import download

# Raises the error that a check's flags stand for.
Explain = Callable[[list[bool]], None]
_Pending = list[tuple[Callable[[], torch.Tensor], Explain]]
_local = threading.local()


def require(flags: torch.Tensor, explain: Explain) -> None:
    """Call ``explain`` unless all flags are True: now, or at the end of ``late_checks`` if the flags are on a GPU.

    Args:
        flags: bool ``[n]``.
        explain: called with the flags; raises.
    """
    pending: _Pending | None = getattr(_local, "pending", None)
    if pending is None or not flags.is_cuda:
        _read(flags, explain)
        return
    pending.append((download(flags), explain))


@contextlib.contextmanager
def late_checks() -> Iterator[None]:
    """Put off what ``require`` checks on a GPU, in this thread, to the end of the block.

    Raises:
        LossInputError: the first failed check's.
    """
    outer, _local.pending = getattr(_local, "pending", None), []
    try:
        yield
        pending: _Pending = _local.pending
    finally:
        _local.pending = outer
    for arrived, explain in pending:
        _read(arrived(), explain)


def _read(flags: torch.Tensor, explain: Explain) -> None:
    values = flags.tolist()
    if not all(values):
        explain(values)
