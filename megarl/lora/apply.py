"""Put LoRA on the linears of any GPTModel: plan, check, then change."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.adapter import LoraAdapter
from megarl.lora.layers import ColumnParallelLora, ParallelLoraLinear, PartPlan, RowParallelLora, mark_parameter
from megarl.lora.targets import check_supported, rank_and_scaling, resolve_targets
from megarl.model.base_tensors import head_layout, layers_of
from megarl.model.families import family_of
from megarl.model.families.base import HF_LAYER, LinearMap
from megarl.model.fusion import part_rows
from megarl.parallel.groups import Groups, current_groups


def apply_lora(
    chunks: Sequence[torch.nn.Module],
    config: LoraConfig,
    hf_config: Mapping[str, Any],
    *,
    seed: int = 0,
    groups: Groups | None = None,
) -> LoraAdapter:
    """Freeze a model and add a LoRA adapter to it, in place.

    Works on every ``GPTModel``, built by megarl or by a user's own script, before it is wrapped in DDP. A and B start
    as PEFT's (Kaiming uniform and zero), drawn per module from ``seed`` and its name: the same at every layout.

    Args:
        chunks: this rank's model chunks (one, or one per virtual pipeline stage).
        config: PEFT's own; ``target_modules`` in Hugging Face names or ``"all-linear"``.
        hf_config: parsed ``config.json`` of the Hugging Face model; names the family.
        seed: of the initialisation.
        groups: default: as mcore has them.

    Raises:
        AdapterError: a target that the model lacks, or a model that already has an adapter.
        UnsupportedError: a PEFT setting, a family or a layer class that is not supported.
    """
    check_supported(config)
    if config.init_lora_weights is not True:
        raise UnsupportedError(f"adapter config: init_lora_weights is {config.init_lora_weights!r}; supported is true")
    groups = groups or current_groups()
    models = [find_gpt(chunk) for chunk in chunks]
    family = family_of(hf_config)
    chosen = resolve_targets(config, family, models[0].config.num_layers)
    plans = [
        (layer, linear, parts)
        for model in models
        for index, layer in layers_of(model)
        for linear in family.linears
        if any(parts := _plan(layer, linear, HF_LAYER.format(index), config, chosen, groups))
    ]
    for model in models:
        model.requires_grad_(False)
    layers = [_wrap(layer, linear, parts, config, groups) for layer, linear, parts in plans]
    for wrapped in layers:
        _create_parameters(wrapped, seed, groups)
    return LoraAdapter(layers, config, family, models[0].config.num_layers, groups)


def find_gpt(module: torch.nn.Module) -> GPTModel:
    """The GPTModel inside wrappers such as DDP and Float16Module."""
    while not isinstance(module, GPTModel):
        if not hasattr(module, "module"):
            raise UnsupportedError(f"LoRA needs mcore's GPTModel, got {type(module).__name__}")
        module = module.module
    return module


def _plan(
    layer: torch.nn.Module, linear: LinearMap, prefix: str, config: LoraConfig, chosen: set[str], groups: Groups
) -> tuple[PartPlan | None, ...]:
    """What to add to one linear; all None where nothing is."""
    module = layer.get_submodule(linear.mcore)
    names = [f"{prefix}{hf}" for hf in linear.hf]
    if not chosen.intersection(names):
        return (None,) * len(names)
    if isinstance(module, ParallelLoraLinear):
        raise AdapterError(f"{prefix}{linear.hf[0]} already has an adapter; apply_lora goes on a model without one")
    expected = ColumnParallelLinear if linear.split == "column" else RowParallelLinear
    if not isinstance(module, expected):
        raise UnsupportedError(
            f"{prefix}{linear.hf[0]} is a {type(module).__name__}; supported is mcore's {expected.__name__}"
        )
    tensor = groups.topology.tensor
    column = linear.split == "column"
    local_out, local_in = module.weight.shape
    plans: list[PartPlan | None] = []
    for name, rows in zip(names, part_rows(local_out, linear.fusion, head_layout(layer.config)), strict=True):
        if name not in chosen:
            plans.append(None)
            continue
        rank, scaling = rank_and_scaling(config, name)
        in_features = local_in * (1 if column else tensor)
        plans.append(PartPlan(name, rank, scaling, in_features, rows * (tensor if column else 1), rows))
    return tuple(plans)


def _wrap(
    layer: torch.nn.Module, linear: LinearMap, parts: tuple[PartPlan | None, ...], config: LoraConfig, groups: Groups
) -> ParallelLoraLinear:
    """Replace the linear in its parent."""
    path, _, attribute = linear.mcore.rpartition(".")
    parent = layer.get_submodule(path)
    base = getattr(parent, attribute)
    kind = ColumnParallelLora if linear.split == "column" else RowParallelLora
    heads = head_layout(layer.config)
    rows = part_rows(base.weight.shape[0], linear.fusion, heads)
    wrapped = kind(base, parts, rows, linear.fusion, heads, config.lora_dropout, groups.tensor)
    setattr(parent, attribute, wrapped)
    return wrapped


def _create_parameters(wrapped: ParallelLoraLinear, seed: int, groups: Groups) -> None:
    """Initialise A and B: each rank draws the whole A and keeps its slice."""
    base = wrapped.base_layer
    column = isinstance(wrapped, ColumnParallelLora)
    sequence_parallel = bool(base.sequence_parallel)
    like = {"dtype": base.weight.dtype, "device": base.weight.device}
    for part in filter(None, wrapped.parts):
        whole = initial_a(part, seed)
        if not column:
            whole = whole.chunk(groups.topology.tensor, dim=1)[groups.tensor_rank]
        matrix_a = torch.nn.Parameter(whole.to(**like).contiguous())
        matrix_b = torch.nn.Parameter(torch.zeros(part.rows, part.rank, **like))
        mark_parameter(matrix_a, None if column else 1, sequence_parallel)
        mark_parameter(matrix_b, 0 if column else None, sequence_parallel)
        wrapped.lora_A[part.key] = matrix_a
        wrapped.lora_B[part.key] = matrix_b


def initial_a(part: PartPlan, seed: int) -> torch.Tensor:
    """The whole A ``[r, in_features]``, float32, from the seed and the module's name alone.

    PEFT's ``kaiming_uniform_(a=sqrt(5))``, which is uniform on +-1 / sqrt(in_features).
    """
    digest = hashlib.sha256(f"{seed}:{part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = part.in_features**-0.5
    return torch.empty(part.rank, part.in_features).uniform_(-bound, bound, generator=generator)
