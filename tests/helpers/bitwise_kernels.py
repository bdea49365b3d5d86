# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of `numerics: bitwise` with torch in float64, and a token's result alone with that in a batch.

Run as a program (`python -m tests.helpers.bitwise_kernels`), it uses float32 on the CPU and Triton's interpreter.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from tests.helpers.interpreter import sum_in_order

EPS = 1e-6
LENGTHS = (3, 70, 1, 130)


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Require float32's accuracy."""
    error = (ours.double() - exact.double()).norm() / exact.double().norm()
    assert error < 2e-6, float(error)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def matmul_is_exact_and_blind() -> None:
    from megarl.bitwise.kernels.matmul import NARROW, WIDE, matmul

    inputs, weight, bias = draw(70, 208), draw(96, 208), draw(96)
    exact = F.linear(inputs.double(), weight.double(), bias.double())
    for tiles in (NARROW, WIDE):
        whole = matmul(inputs, weight, bias, tiles=tiles)
        close(whole, exact)
        assert torch.equal(matmul(inputs[66:67], weight, bias, tiles=tiles)[0], whole[66])


def lora_is_exact_for_each_adapter() -> None:
    from megarl.bitwise.kernels.low_rank import Columns, Tokens, expand, shrink

    count, depth, rank, features = 75, 96, 8, 160
    inputs, given = draw(count, depth), draw(count, 256)
    a, b = draw(2, rank, depth), draw(2, features, rank)
    adapter_of = torch.arange(count) % 3 - 1
    order = torch.sort(adapter_of, stable=True).indices.int()
    starts = torch.tensor([0, 25, 50, 75], dtype=torch.int32)
    tokens = Tokens(order, starts.diff(), starts, torch.tensor([-1, 0, 1], dtype=torch.int32), 3)
    low, out = torch.zeros(count, rank), given.clone()
    shrink(inputs, a, tokens, low)
    expand(low, b, tokens, out, given, Columns(32, 48, 16))
    column = torch.arange(features) // 32 * 48 + torch.arange(features) % 32 + 16
    exact = given.double()
    for token in range(count):
        adapter = int(adapter_of[token])
        if adapter >= 0:
            exact[token, column] += b[adapter].double() @ (a[adapter].double() @ inputs[token].double())
    close(out, exact)
    assert torch.equal(out[0], given[0])  # a token without adapter


def rows_are_exact() -> None:
    from megarl.bitwise.kernels import rows

    hidden, weight = draw(21, 208), draw(208)
    close(rows.rms_norm(hidden, weight, EPS), F.rms_norm(hidden.double(), (208,), weight.double(), EPS))
    fused, weight = draw(5, 2 * 4 * 32), draw(32)
    heads = rows.Heads(4, 32, 2, 4 * 32, 0)
    query = fused.view(5, 2, 4, 32)[:, :, :2].reshape(5, 4, 32)
    close(rows.rms_norm(fused, weight, EPS, heads), F.rms_norm(query.double(), (32,), weight.double(), EPS))
    angles = draw(5, 16)
    first, second = query.double().chunk(2, -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    close(rows.rotate(fused, angles, heads), turned)
    gate, up = draw(19, 96).double().chunk(2, -1)
    close(rows.swiglu(draw(19, 96)), F.silu(gate) * up)


def logprobs_are_exact() -> None:
    from megarl.bitwise.kernels.logprobs import divide_, row_sums

    logits, temperatures = 4 * draw(3, 5008), torch.tensor([1.0, 0.7, 0.0])
    exact = logits.double() / torch.tensor([1.0, 0.7, 1.0]).double()[:, None]
    divided = divide_(logits.clone(), temperatures)
    close(divided, exact)
    largest, total, moment = row_sums(divided)
    close(largest + total.log(), exact.logsumexp(1))
    probabilities = exact.softmax(1)
    close(total.log() - moment / total, -(probabilities * probabilities.log()).sum(1))


def attention_is_exact_in_pages_and_packed() -> None:
    from megarl.bitwise.kernels.attention import TILE, Pages, attend, packed_pages
    from megarl.model.layers.bitwise.attention_gradient import attend_backward

    groups, queries, width, scale = 2, 3, 32, 0.2
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    tokens = sum(LENGTHS)
    query, key, value = draw(tokens, groups * queries, width), draw(tokens, groups, width), draw(tokens, groups, width)
    out, sums = attend(query, packed_pages(key, value, bounds, max(LENGTHS)), bounds, scale)
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    exact = torch.cat([_attend(*(t[a:b] for t in leaves), scale) for a, b in pairwise(bounds)])
    close(out, exact.detach())
    slope = draw(*exact.shape)
    exact.backward(slope.double())
    gradients = attend_backward(slope, query, key, value, out, sums, bounds, max(LENGTHS), scale)
    for ours, leaf in zip(gradients, leaves, strict=True):
        close(ours, leaf.grad)
    # The last 40 queries of the last sequence, over pages of the others' in any order, whose rest is not a number.
    pages = torch.full((5, 2 * TILE, groups, 2 * width), float("nan"))
    start, length = int(bounds[-2]), LENGTHS[-1]
    for number, page in enumerate((4, 1)):
        end = min(length - number * 2 * TILE, 2 * TILE)
        rows = slice(start + number * 2 * TILE, start + number * 2 * TILE + end)
        pages[page, :end] = torch.cat([key[rows], value[rows]], -1)
    keys, values = pages.split(width, -1)
    numbers = torch.tensor([[0, 0, 7], [4, 1, 7]], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    seen = Pages(keys, values, keys.stride()[:3], values.stride()[:3], groups, *numbers, 2 * TILE)
    last, _ = attend(query[tokens - 40 :], seen, torch.tensor([0, 0, 40], dtype=torch.int32), scale)
    assert torch.equal(last, out[tokens - 40 :])


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sum_in_order()
    matmul_is_exact_and_blind()
    lora_is_exact_for_each_adapter()
    rows_are_exact()
    logprobs_are_exact()
    attention_is_exact_in_pages_and_packed()
