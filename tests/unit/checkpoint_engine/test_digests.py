# SPDX-License-Identifier: Apache-2.0
"""Check where the digests of a bucket are formed."""

import pytest
import torch

from megarl.checkpoint_engine.buckets.digests import begin_digests
from megarl.checkpoint_engine.wire import Place, Places


def test_a_bucket_in_the_memory_of_neither_host_nor_cuda_comes_to_the_host_first() -> None:
    """As that of an NPU does. ``meta`` has no bytes to bring, so that torch refuses the copy that it is asked for."""
    places = Places([Place("weight", "float32", (2,), 0, 0, 8)])
    digests = begin_digests(torch.empty(8, dtype=torch.uint8, device="meta"), places)
    with pytest.raises(NotImplementedError, match=r"[Cc]annot copy out of meta tensor"):
        digests()
