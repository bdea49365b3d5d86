# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention on CUDA, rank by rank on one GPU: flash attention in bf16 against SDPA in fp32."""

import pytest
import torch
import torch.nn.functional as F

from megarl.model.layers.attention.core import PackedSequences, attend_runs
from megarl.model.layers.attention.zigzag import rank_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

HEADS, KV_HEADS = 8, 2


def attend_ranks(leaves: list[torch.Tensor], lengths: tuple[int, ...], context: int) -> torch.Tensor:
    """Return the output of the whole pack ``[T, heads, dim]``: each rank's runs, on keys gathered without a group."""
    query, key, value = leaves
    device = query.device
    held = [torch.from_numpy(rank_tokens(lengths, context, rank)).to(device) for rank in range(context)]
    gathered = torch.cat(held)
    outs = []
    for rank in range(context):
        packed = PackedSequences.from_lengths(lengths, device, context=context, context_rank=rank)
        rows = gathered if packed.key_rows is None else gathered[packed.key_rows]
        # Through float32, in which the gradients of all ranks are summed.
        keys, values = (tensor.float()[rows].to(tensor.dtype) for tensor in (key, value))
        outs.append(attend_runs(query[held[rank]], keys, values, packed, None))
    return torch.empty_like(query).index_copy(0, gathered, torch.cat(outs))


def attend_whole(leaves: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the same by SDPA, sequence by sequence."""
    parts = zip(*(leaf.transpose(0, 1).split(lengths, dim=1) for leaf in leaves), strict=True)
    outs = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        for q, k, v in parts
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("context", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 20), (torch.float32, 64)])
def test_output_and_gradients_are_those_of_sdpa_on_the_whole_pack(context, dtype, head_dim):
    lengths = tuple(2 * context * chunk for chunk in (1, 37, 2, 300, 128))
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors = [torch.randn(sum(lengths), n, head_dim, device="cuda", generator=generator) for n in heads]

    def run(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, gradient = [tensor.to(dtype) for tensor in tensors]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = attend(leaves)
        return [tensor.double() for tensor in (out.detach(), *torch.autograd.grad(out, leaves, gradient))]

    # From inputs rounded to bf16, so that only the computation differs.
    tensors = [tensor.to(torch.bfloat16).float() for tensor in tensors]
    truth = run(lambda leaves: attend_whole(leaves, lengths), torch.float32)
    ours = run(lambda leaves: attend_ranks(leaves, lengths, context), dtype)
    theirs = run(lambda leaves: attend_whole(leaves, lengths), dtype)
    for name, mine, other, exact in zip(("output", "query", "key", "value"), ours, theirs, truth, strict=True):
        error, allowed = (mine - exact).norm() / exact.norm(), (other - exact).norm() / exact.norm()
        assert error <= 1.5 * allowed + 1e-5, (name, error, allowed)
