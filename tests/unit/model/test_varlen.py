# SPDX-License-Identifier: Apache-2.0
"""Test the call of torch's flash attention on tensors without memory; tests/gpu compares what it computes."""

from types import SimpleNamespace

import pytest
import torch

from megarl.model.layers.attention import varlen


@pytest.mark.parametrize(("window", "seen"), [(None, (True, -1)), (5, (False, 4))])
def test_the_kernel_is_called_through_torchs_own_autograd(monkeypatch, window, seen):
    monkeypatch.setattr(varlen, "_shares_keys", lambda: True)
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    packed = SimpleNamespace(query_bounds=bounds, key_bounds=bounds, longest_query=9, longest_key=11)
    shapes = (16, 4, 20), (16, 2, 20), (16, 2, 18)
    leaves = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    out = varlen.attend_varlen(*leaves, packed, 0.3, window)
    assert out.shape == (16, 4, 18)
    called = out.grad_fn.next_functions[0][0]
    assert called.name() == "FlashAttentionBackward0"
    # Read as an unsigned number.
    assert (called._saved_is_causal, called._saved_window_size_left) == (seen[0], seen[1] % 2**64)
    assert (called._saved_max_q, called._saved_max_k, called._saved_scale) == (9, 11, 0.3)
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [gradient.shape for gradient in gradients] == list(shapes)
