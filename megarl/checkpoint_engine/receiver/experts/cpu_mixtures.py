# SPDX-License-Identifier: Apache-2.0
"""Run routed experts with LoRA on vLLM's CPU back end.

With LoRA enabled, vLLM 0.32 runs every mixture of experts through its Triton kernels, whether or not an adapter has
experts, and Triton needs a GPU. This module computes with torch from the same base weights and per-slot adapter
buffers, which vLLM has loaded, checked and scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megarl.errors import UnsupportedError


def install() -> None:
    """Replace the computation of the Triton experts. Does nothing if vLLM has none."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    except ImportError:
        return
    TritonExperts.apply = _apply


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[T, 2I] -> [T, I]``: silu of the first half times the second (Shazeer, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """``[T, 2I] -> [T, I]``: the activation of OpenAI's gpt-oss, whose gates and ups alternate (arXiv:2508.10925)."""
    gate, up = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1.0) * gate * torch.sigmoid(ALPHA * gate)


# vLLM's names of the activations. The numbers are gpt-oss' own.
ACTIVATIONS = {"silu": silu_and_mul, "swigluoai": swiglu_oai}
LIMIT, ALPHA = 7.0, 1.702


@dataclass(frozen=True)
class _Slots:
    """Adapter buffers, each ``[slots, experts, ...]``, and the slot of each token (-1 for none).

    Shapes: H hidden, I inner, r rank. Gate and up: A ``[r, H]``, B ``[I, r]``; down: A ``[r, I]``, B ``[H, r]``.
    """

    of_token: torch.Tensor
    gate_up_a: tuple[torch.Tensor, ...]
    gate_up_b: tuple[torch.Tensor, ...]
    down_a: tuple[torch.Tensor, ...]
    down_b: tuple[torch.Tensor, ...]


def _apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """vLLM's ``FusedMoEExpertsModular.apply``, for unquantised gated experts that are all on this rank."""
    kind = getattr(activation, "value", activation)
    if kind not in ACTIVATIONS:
        raise UnsupportedError(f"experts on a CPU support the activations {', '.join(ACTIVATIONS)}, not {activation}")
    if expert_map is not None or apply_router_weight_on_input or a1q_scale is not None or a2_scale is not None:
        raise UnsupportedError(
            "experts on a CPU are supported unquantised, all on each rank, and weighted after their computation"
        )
    context = self._lora_context
    slots = None
    if context is not None:
        slots = _Slots(
            context.punica_wrapper.token_lora_indices,
            context.w13_lora_a_stacked,
            context.w13_lora_b_stacked,
            context.w2_lora_a_stacked,
            context.w2_lora_b_stacked,
        )
    biases = self.w1_bias, self.w2_bias
    output.copy_(run_experts(hidden_states, w1, w2, topk_weights, topk_ids, slots, biases, ACTIVATIONS[kind]))


def run_experts(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    slots: _Slots | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    activate: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, float32 ``[T, H]``.

    Args:
        hidden: ``[T, H]``.
        w1: gate then up, ``[E, 2I, H]``.
        w2: ``[E, H, I]``.
        weights, chosen: routing probabilities and expert indices, ``[T, K]``.
        slots: the adapters' buffers, or None.
        biases: of ``w1``, ``[E, 2I]``, and of ``w2``, ``[E, H]``.
        activate: maps ``[T, 2I]`` to ``[T, I]``.
    """
    first, second = ([None] * len(w1) if bias is None else bias for bias in biases)
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in torch.unique(chosen).tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        inputs = hidden[token]
        gate_up = F.linear(inputs, w1[expert], first[expert])
        if slots is not None:
            _add(gate_up, inputs, slots.gate_up_a, slots.gate_up_b, slots.of_token[token], expert)
        inner = activate(gate_up)
        out = F.linear(inner, w2[expert], second[expert])
        if slots is not None:
            _add(out, inner, slots.down_a, slots.down_b, slots.of_token[token], expert)
        total.index_add_(0, token, out.float() * weights[token, choice, None].float())
    return total


def _add(
    out: torch.Tensor,
    inputs: torch.Tensor,
    matrices_a: tuple[torch.Tensor, ...],
    matrices_b: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    expert: int,
) -> None:
    """Add each slot's delta to its rows. The parts lie side by side in ``out``. The scaling is already in B."""
    for slot in torch.unique(slots).tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        parts = [
            F.linear(F.linear(inputs[rows], a[slot, expert]), b[slot, expert])
            for a, b in zip(matrices_a, matrices_b, strict=True)
        ]
        out[rows] += torch.cat(parts, dim=-1)
