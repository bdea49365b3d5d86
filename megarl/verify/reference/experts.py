# SPDX-License-Identifier: Apache-2.0
"""Handle mixtures of experts in the reference: transformers stacks a layer's experts, adapter files list them singly.

PEFT adapts the stacked gate and up projections by one pair of matrices of twice the rank: A = [A_gate; A_up] and, after
loading a file with separate pairs, B = [[B_gate, 0], [0, B_up]]. This module masks the gradient of the zero blocks, so
that they stay zero. The reference then computes what the file means: separate adapters of gate and up.
"""

import re
from collections.abc import Mapping

import torch

from megarl.families import WeightMap

_STACKED = re.compile(r"(.*model\.layers\.(\d+)\.)mlp\.experts\.(base_layer\.)?lora_([AB])\.weight")
_ROUTER = re.compile(r"(.*model\.layers\.(\d+)\.)mlp\.gate\.lora_([AB])\.weight")


def hold_zeros(model: torch.nn.Module) -> None:
    """Mask the gradient of the blocks that would couple gate and up."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts.base_layer.lora_B." in name:
            experts = model.get_submodule(name.partition(".lora_B.")[0]).num_experts
            rows, rank = parameter.shape[0] // 2, parameter.shape[1] // experts // 2
            mask = torch.zeros(2, rows, 2, rank, experts)
            mask[0, :, 0] = mask[1, :, 1] = 1
            mask = mask.view_as(parameter)
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask.to(gradient))


def unstack(tensors: Mapping[str, torch.Tensor], names: WeightMap) -> dict[str, torch.Tensor]:
    """Convert PEFT's tensors of a whole adapter to the file's names: experts one by one, gate and up separate."""
    unstacked: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if match := _STACKED.fullmatch(name):
            prefix, layer, inner, side = match.groups()
            unstacked |= _experts(prefix, int(layer), bool(inner), side, tensor, names)
        elif match := _ROUTER.fullmatch(name):
            prefix, layer, side = match.groups()
            [router] = [linear.hf[0] for linear in names.linears(int(layer)) if linear.is_router]
            unstacked[f"{prefix}{router}.lora_{side}.weight"] = tensor
        else:
            unstacked[name] = tensor
    return unstacked


def _experts(
    prefix: str, layer: int, gate_up: bool, side: str, tensor: torch.Tensor, names: WeightMap
) -> dict[str, torch.Tensor]:
    count, unstacked = names.num_experts, {}
    for linear in names.linears(layer):
        if linear.expert is None or (len(linear.hf) == 2) != gate_up:
            continue
        if side == "A":
            parts = tensor.view(count, -1, tensor.shape[1])[linear.expert].chunk(len(linear.hf))
        else:
            whole = tensor.view(tensor.shape[0], -1, count)[..., linear.expert]
            if gate_up:
                blocks = whole.view(2, whole.shape[0] // 2, 2, -1)
                parts = (blocks[0, :, 0], blocks[1, :, 1])
            else:
                parts = (whole,)
        for hf, part in zip(linear.hf, parts, strict=True):
            unstacked[f"{prefix}{hf}.lora_{side}.weight"] = part.clone()
    return unstacked
