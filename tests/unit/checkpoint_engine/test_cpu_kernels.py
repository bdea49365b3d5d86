# SPDX-License-Identifier: Apache-2.0
"""Compare megarl's CPU LoRA kernels with vLLM's own, for one adapter, for several, and for tokens without one."""

import pytest
import torch

from megarl.checkpoint_engine.receiver import cpu_kernels

original = pytest.importorskip("vllm.lora.ops.torch_ops")

TOKENS, SLOTS, IN, RANK, OUT = 7, 3, 12, 4, 10


def inputs(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw(TOKENS, IN), draw(SLOTS, 1, RANK, IN), draw(SLOTS, 1, OUT, RANK), draw(TOKENS, 2 * OUT)


@pytest.mark.parametrize("indices", [[1] * 7, [0, 0, 2, 2, 1, 0, 2]], ids=["one", "several"])
def test_shrink_and_expand_equal_vllms(indices):
    hidden, matrix_a, matrix_b, base = inputs()
    index = torch.tensor(indices)
    low = [torch.zeros(TOKENS, RANK) for _ in range(2)]
    original.bgmv_shrink(hidden, matrix_a, low[0], index, 0.5)
    cpu_kernels.bgmv_shrink(hidden, matrix_a, low[1], index, 0.5)
    torch.testing.assert_close(low[1], low[0], rtol=1e-6, atol=1e-6)
    outs = [base.clone() for _ in range(4)]
    original.bgmv_expand_slice(low[0], matrix_b, outs[0], index, 3, OUT, True)
    cpu_kernels.bgmv_expand_slice(low[0], matrix_b, outs[1], index, 3, OUT, True)
    original.bgmv_expand(low[0], matrix_b, outs[2], index, True)
    cpu_kernels.bgmv_expand(low[0], matrix_b, outs[3], index, True)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(outs[3], outs[2], rtol=1e-2, atol=1e-2)
    assert not torch.equal(outs[1], base)


def test_indices_per_sequence_are_spread_over_its_tokens():
    hidden, matrix_a, matrix_b, base = inputs()
    lengths, index = torch.tensor([2, 4, 1]), torch.tensor([2, 0, 1])
    metadata = (torch.tensor([0, 2, 6]), lengths, index, 3, 4, TOKENS)
    low = [torch.zeros(TOKENS, RANK) for _ in range(2)]
    original.sgmv_shrink(hidden, matrix_a, low[0], *metadata, 1.0)
    cpu_kernels.sgmv_shrink(hidden, matrix_a, low[1], *metadata, 1.0)
    torch.testing.assert_close(low[1], low[0], rtol=1e-6, atol=1e-6)
    outs = [base.clone() for _ in range(2)]
    original.sgmv_expand_slice(low[0], matrix_b, outs[0], *metadata, 0, OUT, True)
    cpu_kernels.sgmv_expand_slice(low[0], matrix_b, outs[1], *metadata, 0, OUT, True)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-2, atol=1e-2)


def test_tokens_without_an_adapter_are_left_alone():
    hidden, matrix_a, matrix_b, base = inputs()
    index = torch.tensor([-1, 1, -1, 1, 1, -1, -1])
    low, out = torch.zeros(TOKENS, RANK), base.clone()
    cpu_kernels.bgmv_shrink(hidden, matrix_a, low, index)
    cpu_kernels.bgmv_expand_slice(low, matrix_b, out, index, 0, OUT, True)
    assert torch.equal(out[index < 0], base[index < 0])
    assert not torch.equal(out[index == 1], base[index == 1])


def test_installed_in_the_wrapper_that_vllm_uses_on_a_cpu():
    punica_cpu = pytest.importorskip("vllm.lora.punica_wrapper.punica_cpu")
    before = {name: getattr(punica_cpu, name) for name in dir(punica_cpu) if name.startswith(("bgmv", "sgmv"))}
    assert before
    try:
        cpu_kernels.install()
        assert all(getattr(punica_cpu, name) is getattr(cpu_kernels, name) for name in before)
    finally:
        for name, function in before.items():
            setattr(punica_cpu, name, function)
