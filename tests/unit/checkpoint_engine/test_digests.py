# SPDX-License-Identifier: Apache-2.0
"""Check where the digests of buckets and of an engine's tensors are formed."""

import pytest
import torch

from megarl.checkpoint_engine.buckets.digests import begin_digests
from megarl.checkpoint_engine.buckets.splitmix import mix64
from megarl.checkpoint_engine.receiver.sleep import digests as digests_of
from megarl.checkpoint_engine.wire import Place, Places


def test_a_bucket_in_the_memory_of_neither_host_nor_cuda_comes_to_the_host_first() -> None:
    """As that of an NPU does. ``meta`` has no bytes to bring, so that torch refuses the copy that it is asked for."""
    places = Places([Place("weight", "float32", (2,), 0, 0, 8)])
    digests = begin_digests(torch.empty(8, dtype=torch.uint8, device="meta"), places)
    with pytest.raises(NotImplementedError, match=r"[Cc]annot copy out of meta tensor"):
        digests()


def test_an_engines_tensors_are_digested_where_they_are() -> None:
    """On the host too, where vLLM keeps some; a GPU's kernel that gets their addresses takes the engine down."""
    held = torch.arange(7, dtype=torch.int32)
    turned = torch.arange(6.0).view(2, 3).t()
    found = digests_of({"held": held, "turned": turned, "nowhere": torch.empty(2, device="meta")})
    expected = {"held": held, "turned": turned.contiguous()}
    assert found == {name: mix64(tensor.numpy().tobytes()) for name, tensor in expected.items()}
