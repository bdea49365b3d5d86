# SPDX-License-Identifier: Apache-2.0
"""Arrays that go to a device together arrive as they were, whatever their dtypes and sizes."""

import numpy as np
import torch

from megarl.cuda_memory import upload_together


def test_arrays_of_several_dtypes_arrive_as_they_were() -> None:
    given = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.random.default_rng(0).normal(size=21).astype(np.float32),
        np.array([True, False, True]),
        np.arange(11)[::-1],
    ]
    moved = upload_together(given, torch.device("cpu"))
    assert all(one.dtype == other.numpy().dtype for one, other in zip(given, moved, strict=True))
    assert all(np.array_equal(one, other.numpy()) for one, other in zip(given, moved, strict=True))
    # By one copy, and aligned for any dtype.
    assert len({one.untyped_storage().data_ptr() for one in moved}) == 1
    assert not any(one.data_ptr() % 16 for one in moved if one.numel())
    assert upload_together([], torch.device("cpu")) == []
