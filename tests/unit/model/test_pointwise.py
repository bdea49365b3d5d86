# SPDX-License-Identifier: Apache-2.0
"""Compare the local back end's pointwise functions with Hugging Face's, as written and compiled."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from megarl.model.layers import pointwise

TOKENS, HEADS, HEAD_DIM = 5, 3, 8


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_rms_norm() -> None:
    theirs = Qwen3RMSNorm(HEAD_DIM, eps=1e-5)
    theirs.weight.data = draw(HEAD_DIM).float()
    hidden = draw(TOKENS, 1, HEADS, HEAD_DIM).float()
    torch.testing.assert_close(pointwise.rms_norm(hidden, theirs.weight, 1e-5), theirs(hidden))


def test_swiglu() -> None:
    both = draw(TOKENS, 1, 12)
    expected = torch.nn.functional.silu(both[..., :6]) * both[..., 6:]
    torch.testing.assert_close(pointwise.SwiGLU(None)(both), expected)


def test_rotate_leaves_what_has_no_angle() -> None:
    states = draw(TOKENS, 1, HEADS, HEAD_DIM + 2).float()
    half = draw(TOKENS, HEAD_DIM // 2).float()
    angles = torch.cat((half, half), dim=-1)
    ours = pointwise.rotate(states, angles[:, None, None])
    turned = states[..., :HEAD_DIM].permute(1, 2, 0, 3)  # Hugging Face: [1, heads, T, head_dim]
    expected, _ = apply_rotary_pos_emb(turned, turned, angles.cos()[None], angles.sin()[None])
    torch.testing.assert_close(ours[..., :HEAD_DIM], expected.permute(2, 0, 1, 3))
    assert torch.equal(ours[..., HEAD_DIM:], states[..., HEAD_DIM:])


def test_a_compiled_function_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that runs on CUDA, through the part of the compiler that needs none; with two numbers of tokens."""
    monkeypatch.setattr(pointwise, "wants_compilation", lambda tensor: True)
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="aot_eager", fullgraph=True))
    function = pointwise.compile_on_cuda(pointwise.swiglu)
    for tokens in (3, 5):
        leaf, twin = (draw(tokens, 12).requires_grad_() for _ in range(2))
        function(leaf).pow(2).sum().backward()
        pointwise.swiglu(twin).pow(2).sum().backward()
        torch.testing.assert_close(leaf.grad, twin.grad)


def test_where_compilation_fails_the_function_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(pointwise, "wants_compilation", lambda tensor: True)
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=broken))
    function = pointwise.compile_on_cuda(pointwise.swiglu)
    both = draw(TOKENS, 12)
    with pytest.warns(UserWarning, match="torch.compile of swiglu failed"):
        first = function(both)
    assert torch.equal(first, function(both))
    assert torch.equal(first, pointwise.swiglu(both))
