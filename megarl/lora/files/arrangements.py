# SPDX-License-Identifier: Apache-2.0
"""Convert a PEFT file between the two forms in which it can hold adapters of experts.

``per_expert`` has a pair of matrices for each linear of each expert, with the names in ``target_modules``; vLLM loads
it unchanged. ``stacked`` is the form in which PEFT 0.21 saves with transformers 5, with the parameters in
``target_parameters`` (``megarl.lora.files.stacked_experts``).

To stack, the pairs of gate and up become one pair of twice the rank: A = [A_gate; A_up], B = [[B_gate, 0], [0, B_up]],
as PEFT itself converts them. To unstack, a pair of gate and up of rank r becomes two pairs with the same A.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from peft import LoraConfig

from megarl.errors import UnsupportedError
from megarl.families import WeightMap
from megarl.lora.files.stacked_experts import AdapterFile, locate_matrices, pack
from megarl.lora.targets.parameters import ROUTER, as_parameters, expert_leaves
from megarl.lora.targets.resolve import expand_all_linear, resolve_targets
from megarl.peft.names import matrix_name
from megarl.peft.rules import rank_and_scaling

AS_TRAINED, STACKED, PER_EXPERT = "as_trained", "stacked", "per_expert"


def arrange_config(config: LoraConfig, names: WeightMap, experts: str) -> LoraConfig:
    """Return the config of a file whose experts are in another form.

    Args:
        config: the adapter's config.
        names: the model's tensor names.
        experts: the form: ``"as_trained"`` (that of the config), ``"stacked"`` or ``"per_expert"``.

    Raises:
        UnsupportedError: PEFT would read the file as another adapter.
    """
    config = expand_all_linear(config, names)
    if experts == STACKED and not config.target_parameters:
        chosen = resolve_targets(config, names)
        return as_parameters(config, names) if (names.expert_names() | names.router_names()) & chosen.keys() else config
    if experts != PER_EXPERT or not config.target_parameters:
        return config
    old, leaves = resolve_targets(config, names), expert_leaves(names)
    named = {key.rpartition(".")[2] for key in old.values()} | (
        {ROUTER} if names.router_names() & old.keys() else set()
    )
    targets = set(config.target_modules or ()) | {leaf for leaf, parameter in leaves.items() if parameter in named}
    new = dataclasses.replace(config, target_modules=targets, target_parameters=None)
    try:
        there = resolve_targets(new, names) if targets else {}
    except UnsupportedError as error:
        raise UnsupportedError(f"lora.save_experts is 'per_expert', but then: {error}; set it to 'stacked'") from error
    for name in sorted(old.keys() | there.keys()):
        if name not in there or name not in old:
            reason = f"'{name}' is {'not ' if name not in old else ''}adapted, which target_modules cannot say"
        elif rank_and_scaling(new, there[name]) != rank_and_scaling(config, old[name]):
            reason = f"'{name}' has another rank or alpha than r and lora_alpha"
        else:
            continue
        raise UnsupportedError(f"lora.save_experts is 'per_expert', but {reason}; set it to 'stacked'")
    return new


def arrange(
    tensors: Mapping[str, torch.Tensor], config: LoraConfig, names: WeightMap, experts: str
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    """Return a file's tensors and config with the experts in another form; see ``arrange_config``."""
    new = arrange_config(config, names, experts)
    if bool(new.target_parameters) == bool(config.target_parameters):
        return dict(tensors), new
    targets = resolve_targets(new, names)
    if new.target_parameters:
        return dict(pack(_fused(tensors, targets, names), locate_matrices(targets, names))), new
    file = AdapterFile(_Whole(tensors), resolve_targets(config, names), names)
    pairs = {name: file.pair(name) for name in targets}
    return {
        matrix_name(name, side): matrix.clone(memory_format=torch.contiguous_format)
        for name, pair in pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }, new


def _fused(
    tensors: Mapping[str, torch.Tensor], targets: Mapping[str, str], names: WeightMap
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge the pairs of each expert's parameter into one pair, under the names that ``pack`` takes."""
    experts = names.expert_names()
    for name in targets:
        if name not in experts:
            yield from ((matrix_name(name, side), tensors[matrix_name(name, side)]) for side in "AB")
    for key, linears in names.parameter_names().items():
        if linears[0] not in experts or linears[0] not in targets or key != targets[linears[0]]:
            continue
        parts = len(linears) // names.num_experts
        for first in range(0, len(linears), parts):
            members = linears[first : first + parts]
            yield matrix_name(members[0], "A"), torch.cat([tensors[matrix_name(name, "A")] for name in members])
            whole = torch.block_diag(*(tensors[matrix_name(name, "B")] for name in members))
            for name, rows in zip(members, whole.chunk(parts), strict=True):
                yield matrix_name(name, "B"), rows


class _Whole:
    """Tensors in memory with the interface of ``safetensors.safe_open``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.tensors[name])


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor[index]
