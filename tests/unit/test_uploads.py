# SPDX-License-Identifier: Apache-2.0
"""Tensors that go to a device together arrive as they were, whatever their dtypes and sizes."""

import torch

from megarl.cuda_memory import upload_together


def test_tensors_of_several_dtypes_arrive_as_they_were() -> None:
    given = [
        torch.arange(5, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.randn(3, 7, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(11).bfloat16(),
    ]
    moved = upload_together(given, torch.device("cpu"))
    assert all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(given, moved, strict=True))
    # By one copy, and aligned for any dtype.
    assert len({one.untyped_storage().data_ptr() for one in moved}) == 1
    assert not any(one.data_ptr() % 16 for one in moved if one.numel())
    assert upload_together([], torch.device("cpu")) == []
