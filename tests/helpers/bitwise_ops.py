# SPDX-License-Identifier: Apache-2.0
"""Check the custom operations of `numerics: bitwise`: by torch's own rules, and their gradients against float64.

Run as a program (`python -m tests.helpers.bitwise_ops`), it uses float32 on the CPU and Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megarl.bitwise.linear import linear
from megarl.lora.layers import bitwise as lora
from megarl.lora.layers.products import Layout, add_wide
from megarl.model.layers.bitwise import ops
from megarl.model.weights.fusion import HeadLayout
from tests.helpers.bitwise_kernels import close, draw
from tests.helpers.interpreter import sum_in_order

EPS = 1e-6
HEADS = HeadLayout(groups=2, queries=3, head_dim=16)


def check(op: Any, *given: Any) -> None:
    """Require what torch requires of a custom operation: schema, fake, autograd and tracing."""
    torch.library.opcheck(op, given)


def gradients_agree(ours: Callable, exact: Callable, leaves: list[torch.Tensor]) -> None:
    """Compare a function's results and gradients with those of its formula in float64."""
    outs = []
    for compute, dtype in ((ours, torch.float32), (exact, torch.float64)):
        given = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = compute(*given)
        out.backward(draw(*out.shape).to(dtype))
        outs.append([out.detach(), *(leaf.grad for leaf in given)])
    for one, other in zip(*outs, strict=True):
        close(one, other)


def rows() -> None:
    hidden, weight, fused = draw(5, 48), draw(48), draw(7, 96)
    check(ops.rms_norm, hidden.requires_grad_(), weight, EPS)
    gradients_agree(
        lambda h: ops.rms_norm(h, weight, EPS), lambda h: F.rms_norm(h, (48,), weight.double(), EPS), [hidden]
    )
    check(ops.swiglu, fused.requires_grad_())
    gradients_agree(ops.swiglu, lambda f: F.silu(f[:, :48]) * f[:, 48:], [fused])


def heads() -> None:
    groups, queries, width = HEADS.groups, HEADS.queries, HEADS.head_dim
    fused, half = draw(5, groups * (queries + 2) * width), draw(5, width // 2)
    angles, layout = torch.cat([half, half], 1), [groups, queries, width]
    for weights in ([draw(width), draw(width) + 1], []):

        def ours(fused: torch.Tensor, weights: list = weights) -> torch.Tensor:
            return torch.cat(ops.prepare_heads(fused, angles, weights, EPS, layout), 1)

        def exact(fused: torch.Tensor, weights: list = weights) -> torch.Tensor:
            grouped = fused.view(5, groups, queries + 2, width)
            parts = [grouped[:, :, :queries].flatten(1, 2), grouped[:, :, queries], grouped[:, :, queries + 1]]
            for i in range(2):
                if weights:
                    parts[i] = F.rms_norm(parts[i], (width,), weights[i].double(), EPS)
                first, second = parts[i].chunk(2, -1)
                turned = torch.cat((-second, first), -1)
                cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
                parts[i] = parts[i] * cos + turned * sin
            return torch.cat(parts, 1)

        check(ops.prepare_heads, fused.requires_grad_(), angles, weights, EPS, layout)
        gradients_agree(ours, exact, [fused])


def attention() -> None:
    bounds = torch.tensor([0, 3, 70], dtype=torch.int32)
    states = [draw(70, 4, 16), draw(70, 2, 16), draw(70, 2, 16) + 1]
    check(ops.attend, *(state.requires_grad_() for state in states), bounds, 67, 0.25)


def linears() -> None:
    inputs, weight, bias = draw(6, 48), draw(80, 48), draw(80)
    check(linear, inputs.requires_grad_(), weight, bias)
    gradients_agree(lambda x: linear(x, weight, bias), lambda x: F.linear(x, weight.double(), bias.double()), [inputs])
    rows = {"single": (80,), "gated": (48, 48), "qkv": (96, 32, 32)}
    cases = [("single", (0,), (2.0,)), ("gated", (0, 1), (2.0, 2.0)), ("qkv", (0, 1, 2), (0.5, 2.0, 1.0)),
             ("qkv", (0, 2), (0.5, 0.5))]  # fmt: skip
    for fusion, places, scalings in cases:
        ranks = (4, 16, 8)[: len(places)]
        layout = Layout(places, ranks, scalings, fusion, HEADS)
        base = draw(sum(rows[fusion]), 48)
        a, b = draw(sum(ranks), 48), [draw(rows[fusion][p], r) for p, r in zip(places, ranks, strict=True)]

        def ours(x: torch.Tensor, a: torch.Tensor, *b: torch.Tensor, given: tuple = (base, layout)) -> torch.Tensor:
            return lora.adapted_linear(x, given[0], None, a, list(b), given[1])

        def exact(x: torch.Tensor, a: torch.Tensor, *b: torch.Tensor, given: tuple = (base, layout)) -> torch.Tensor:
            return add_wide(x @ given[0].double().T, x @ a.T, b, given[1])

        gradients_agree(ours, exact, [inputs, a, *b])
    numbers = [*places, *ranks, *layout.starts, HEADS.groups, HEADS.queries, HEADS.head_dim]
    leaves = [tensor.requires_grad_() for tensor in b]
    check(lora._adapted_linear, inputs, base, None, a.requires_grad_(), leaves, list(scalings), numbers, fusion)


def head() -> None:
    from megarl.loss.logprobs import token_logprobs

    hidden, weight, labels = draw(9, 48), draw(160, 48), torch.arange(9) * 17

    def exact(hidden: torch.Tensor) -> torch.Tensor:
        logprobs = (hidden @ weight.double().T / 0.7).log_softmax(1)
        return torch.stack([logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)])

    for keep in (0, 2**30):

        def ours(hidden: torch.Tensor, keep: int = keep) -> torch.Tensor:
            given = {"temperature": 0.7, "chunk_tokens": 4, "keep_bytes": keep}
            return torch.stack(token_logprobs(hidden, weight, labels, bitwise=True, **given))

        gradients_agree(ours, exact, [hidden])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sum_in_order()
    for run in (rows, heads, attention, linears, head):
        run()
