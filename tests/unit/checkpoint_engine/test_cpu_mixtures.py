# SPDX-License-Identifier: Apache-2.0
"""Compare routed experts with LoRA on a CPU with a plain loop over tokens in float64, with the adapters merged."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from megarl.checkpoint_engine.receiver.experts import cpu_mixtures
from megarl.checkpoint_engine.receiver.experts.cpu_mixtures import _Slots, run_experts
from megarl.errors import UnsupportedError

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN, SLOTS, RANK = 11, 12, 10, 6, 2, 3, 4
SLOT_OF_TOKEN = [0, 2, -1, 1, 2, 2, 0, -1, 1, 0, 2]


def layer(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random weights, adapters and routing in which the experts 2 and 5 get no token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    used = torch.tensor([0, 1, 3, 4])
    order = torch.stack([torch.randperm(4, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return {
        "hidden": draw(TOKENS, HIDDEN),
        "w1": draw(EXPERTS, 2 * INNER, HIDDEN),
        "w2": draw(EXPERTS, HIDDEN, INNER),
        "weights": torch.rand(TOKENS, CHOSEN, generator=generator),
        "chosen": used[order],
        "gate_a": draw(SLOTS, EXPERTS, RANK, HIDDEN),
        "gate_b": draw(SLOTS, EXPERTS, INNER, RANK),
        "up_a": draw(SLOTS, EXPERTS, RANK, HIDDEN),
        "up_b": draw(SLOTS, EXPERTS, INNER, RANK),
        "down_a": draw(SLOTS, EXPERTS, RANK, INNER),
        "down_b": draw(SLOTS, EXPERTS, HIDDEN, RANK),
    }


def plain_loop(t: dict[str, torch.Tensor], slots: list[int]) -> torch.Tensor:
    """Compute token by token and choice by choice, with adapters merged into the weights."""
    t = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in t.items()}
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token, slot in enumerate(slots):
        for choice, expert in enumerate(t["chosen"][token].tolist()):
            gate, up = t["w1"][expert].chunk(2)
            down = t["w2"][expert]
            if slot >= 0:
                gate, up, down = (
                    base + t[f"{name}_b"][slot, expert] @ t[f"{name}_a"][slot, expert]
                    for name, base in (("gate", gate), ("up", up), ("down", down))
                )
            inner = F.silu(gate @ t["hidden"][token]) * (up @ t["hidden"][token])
            out[token] += t["weights"][token, choice] * (down @ inner)
    return out


@pytest.mark.parametrize("slots", [SLOT_OF_TOKEN, [1] * TOKENS, [-1] * TOKENS, None], ids=["mixed", "1", "-1", "none"])
def test_experts_equal_a_plain_loop(slots: list[int] | None) -> None:
    t = layer()
    adapters = slots and _Slots(
        torch.tensor(slots), (t["gate_a"], t["up_a"]), (t["gate_b"], t["up_b"]), (t["down_a"],), (t["down_b"],)
    )
    actual = run_experts(t["hidden"], t["w1"], t["w2"], t["weights"], t["chosen"], adapters)
    torch.testing.assert_close(actual.double(), plain_loop(t, slots or [-1] * TOKENS), rtol=1e-5, atol=1e-6)


def test_experts_of_gpt_oss_equal_those_of_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    theirs, t = GptOssExperts(config), layer()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=2.0)  # so that values are clamped
    w1, w2 = (weights.transpose(1, 2) for weights in (theirs.gate_up_proj, theirs.down_proj))
    biases = theirs.gate_up_proj_bias, theirs.down_proj_bias
    with torch.no_grad():
        mine = run_experts(t["hidden"], w1, w2, t["weights"], t["chosen"], None, biases, cpu_mixtures.swiglu_oai)
        expected = theirs(t["hidden"], t["chosen"], t["weights"])
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-4)


def test_the_replaced_method_takes_what_vllm_gives() -> None:
    triton_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    before = triton_moe.TritonExperts.apply
    try:
        cpu_mixtures.install()
        after = triton_moe.TritonExperts.apply
    finally:
        triton_moe.TritonExperts.apply = before
    assert after is not before
    assert list(inspect.signature(after).parameters) == list(inspect.signature(before).parameters)


@pytest.mark.parametrize("refused", [{"activation": "gelu"}, {"expert_map": 1}, {"apply_router_weight_on_input": True}])
def test_other_experts_are_refused(refused: dict) -> None:
    arguments = dict.fromkeys(inspect.signature(cpu_mixtures._apply).parameters)
    with pytest.raises(UnsupportedError, match="experts on a CPU"):
        cpu_mixtures._apply(**{**arguments, "activation": "silu", **refused})
