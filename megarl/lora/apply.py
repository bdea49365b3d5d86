# SPDX-License-Identifier: Apache-2.0
"""Put LoRA on the linears of any GPTModel: plan all changes, check them, then apply them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError
from megarl.families import WeightMap
from megarl.families.base import HF_LAYER, LinearMap
from megarl.lora.adapter import LoraAdapter, wrapped_layers
from megarl.lora.layers.experts import ExpertColumnLora, ExpertRowLora, GateLora, RouterLora
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan
from megarl.lora.layers.parallel_linear import ColumnParallelLora, ParallelLoraLinear, RowParallelLora
from megarl.lora.layers.state import accept_base_alone
from megarl.lora.layers.te import TE_BASES, NormColumnLora, holds_norm
from megarl.lora.layers.vocabulary import plan_vocabulary
from megarl.lora.slot import Slot
from megarl.lora.targets.model_match import check_match
from megarl.lora.targets.parameters import as_peft_reads
from megarl.lora.targets.resolve import resolve_targets
from megarl.model.layers.experts.shared import SharedExpertGate
from megarl.model.layers.recompute import require_input_gradients
from megarl.model.weights.base_tensors import find_linear, layers_of, owner_of, path_of, unwrap
from megarl.model.weights.full_config import names_of
from megarl.model.weights.fusion import head_layout, part_copies, part_rows
from megarl.parallel.groups import Groups, current_groups
from megarl.peft.rules import check_supported, rank_and_scaling

# The mcore class that each kind of adapter layer wraps. Outside experts it may also be one of TE_BASES.
BASES = {
    ColumnParallelLora: ColumnParallelLinear,
    ExpertColumnLora: ColumnParallelLinear,
    RowParallelLora: RowParallelLinear,
    ExpertRowLora: RowParallelLinear,
    RouterLora: TopKRouter,
    GateLora: SharedExpertGate,
}

# Dtypes of weights that are used for computing without conversion.
COMPUTE = (torch.float32, torch.bfloat16, torch.float16)


def apply_lora(
    chunks: Sequence[torch.nn.Module],
    config: LoraConfig,
    hf_config: Mapping[str, Any],
    *,
    name: str = "default",
    trainable: bool = True,
    seed: int = 0,
    groups: Groups | None = None,
) -> LoraAdapter:
    """Freeze a model and add a LoRA adapter to it, in place.

    Works on every ``GPTModel`` that is not yet wrapped in DDP, built by megarl or by a user's own script. A and B are
    initialised as in PEFT (Kaiming uniform and zero). They are drawn per module from ``seed`` and the module's name, so
    they are the same at every layout.

    Call it again with another ``name`` to add a further adapter to the same model. The first adapter is active; see
    ``LoraAdapter.activate``. Only the active adapter computes and gets gradients.

    Args:
        chunks: this rank's model chunks (one, or one per virtual pipeline stage).
        config: PEFT's config, with ``target_modules`` in Hugging Face names or ``"all-linear"``. Experts in
            ``target_modules`` get a pair of matrices for each linear. In ``target_parameters`` gate and up share A, as
            in PEFT.
        hf_config: parsed ``config.json`` of the Hugging Face model; names the family.
        name: name of the adapter within the model.
        trainable: False freezes the adapter (a reference policy). A frozen adapter may be added at any time.
        seed: seed of the initialisation.
        groups: process groups; default: mcore's current ones.

    Raises:
        AdapterError: the model lacks a target; or the adapter's name is taken or invalid.
        UnsupportedError: a PEFT setting, the family or a layer class is not supported; or ``hf_config`` does not
            describe the model.
    """
    check_supported(config)
    if config.init_lora_weights is not True:
        raise UnsupportedError(f"adapter config: init_lora_weights is {config.init_lora_weights!r}; supported is true")
    groups = groups or current_groups()
    models = [find_gpt(chunk) for chunk in chunks]
    for model in models:
        _check_attention(model)
    check_match(models, hf_config, groups)
    names = names_of(hf_config)
    config = as_peft_reads(config, names)
    chosen = resolve_targets(config, names)
    existing = wrapped_layers(models)
    _check_name(name, trainable, models)
    plans = list(_plans(models, config, chosen, names, groups))
    vocabulary = plan_vocabulary(models, config, chosen, hf_config, groups)
    dtype = _dtype_of(models)
    for model in models if not existing else ():
        model.requires_grad_(False)
        require_input_gradients(model)
        accept_base_alone(model)
    slots: list[Slot] = []
    for layer, linear, parts in plans:
        wrapped, matrices = None, None
        if owner_of(linear, names, groups) in (None, groups.expert_rank):
            wrapped = _wrap(layer, linear, names, groups)
            matrices = _matrices(wrapped, parts, config.lora_dropout, seed, dtype, groups)
            wrapped.adapters[name] = matrices.requires_grad_(trainable)
            if trainable:
                wrapped.make_room(matrices)
        slots += [Slot(part, kind_of(linear), wrapped, matrices) for part in parts if part]
    for part, wrap in vocabulary:
        wrapped = wrap()
        matrices = _matrices(wrapped, (part,), config.lora_dropout, seed, dtype, groups)
        wrapped.adapters[name] = matrices.requires_grad_(trainable)
        slots.append(Slot(part, type(wrapped), wrapped, matrices))
    adapter = LoraAdapter(name, models, slots, config, names, dtype, groups, trainable=trainable)
    if not existing:
        adapter.activate()
    return adapter


def _dtype_of(models: Sequence[GPTModel]) -> torch.dtype:
    """Return the dtype of most weights: the model may have been cast after it was built."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if parameter.dtype in COMPUTE:
            counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else models[0].config.params_dtype


def _check_name(name: str, trainable: bool, models: Sequence[GPTModel]) -> None:
    """Refuse a name that is taken or invalid, and a trainable adapter that would never be updated."""
    if not name.isidentifier() or hasattr(torch.nn.ModuleDict, name):
        raise AdapterError(f"adapter name '{name}' cannot be used; take letters, digits and underscores")
    if any(name in layer.adapters for layer in wrapped_layers(models)):
        raise AdapterError(f"the model already has an adapter named '{name}'; give another name")
    if trainable and any(hasattr(parameter, "main_grad") for model in models for parameter in model.parameters()):
        raise AdapterError(
            f"adapter '{name}' comes after the model's gradient buffers were made (DDP), and would never be updated; "
            "apply it before, or with trainable=False"
        )


def kind_of(linear: LinearMap) -> type[ParallelLoraLinear]:
    """Return the adapter layer's class for a linear."""
    if linear.split == "replicated":
        return RouterLora if linear.is_router else GateLora
    if linear.split == "column":
        return ColumnParallelLora if linear.expert is None else ExpertColumnLora
    return RowParallelLora if linear.expert is None else ExpertRowLora


def find_gpt(module: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside wrappers such as DDP and Float16Module."""
    while not isinstance(module, GPTModel):
        if not hasattr(module, "module"):
            raise UnsupportedError(f"LoRA needs mcore's GPTModel, got {type(module).__name__}")
        module = module.module
    return module


def _check_attention(model: GPTModel) -> None:
    for index, layer in layers_of(model):
        if isinstance(layer.self_attention, MultiLatentAttention):
            raise UnsupportedError(
                f"self_attention of layer {index} is mcore's {type(layer.self_attention).__name__}, which does not sum "
                "the gradient of the rotary key over tensor-parallel ranks; supported is LatentAttention "
                "(megarl.model.layers.attention.latent_attention)"
            )


def _plans(
    models: Sequence[GPTModel], config: LoraConfig, chosen: Mapping[str, str], names: WeightMap, groups: Groups
) -> Iterator[tuple[torch.nn.Module, LinearMap, tuple[PartPlan | None, ...]]]:
    """Plan every linear that has an adapted part: its layer, the linear, its parts."""
    for model in models:
        for index, layer in layers_of(model):
            for linear in names.linears(index):
                parts = _plan(layer, linear, HF_LAYER.format(index), config, chosen, names, groups)
                if any(parts):
                    yield layer, linear, parts


def _plan(
    layer: torch.nn.Module,
    linear: LinearMap,
    prefix: str,
    config: LoraConfig,
    chosen: Mapping[str, str],
    names: WeightMap,
    groups: Groups,
) -> tuple[PartPlan | None, ...]:
    """Plan the adapted parts of one linear; None for each part that is not adapted."""
    targets = [f"{prefix}{hf}" for hf in linear.hf]
    if chosen.keys().isdisjoint(targets):
        return (None,) * len(targets)
    module = find_linear(layer, linear, names, groups)
    module, owner = unwrap(module), owner_of(linear, names, groups)
    expected = (BASES[kind_of(linear)], *(TE_BASES[linear.split] if linear.expert is None else ()))
    if not isinstance(module, expected):
        supported = ", ".join(base.__name__ for base in expected)
        raise UnsupportedError(f"{targets[0]} is a {type(module).__name__}; supported is mcore's {supported}")
    size = groups.along(kind_of(linear).axis)[2]
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        raise UnsupportedError(
            f"{targets[0]} is a {type(module).__name__} whose weight is {'absent' if weight is None else 'no matrix'}; "
            "supported are linears that have their weight as one matrix (quantise the base after LoRA was applied, or "
            "not at all)"
        )
    local_out, local_in = weight.shape
    plans: list[PartPlan | None] = []
    heads = head_layout(layer.config)
    counts = zip(part_rows(local_out, linear.fusion, heads), part_copies(linear.fusion, heads), strict=True)
    for name, (rows, copies) in zip(targets, counts, strict=True):
        if name not in chosen:
            plans.append(None)
            continue
        rank, scaling = rank_and_scaling(config, chosen[name])
        # PEFT has one A per parameter, so parts of the same parameter share it.
        shares = next((part.key for part in plans if part and chosen[part.name] == chosen[name]), None)
        in_features = local_in * (size if linear.split == "row" else 1)
        out_features = rows * (size // copies if linear.split == "column" else 1)
        plans.append(
            PartPlan(name, rank, scaling, in_features, out_features, rows, owner, copies=copies, shares=shares)
        )
    return tuple(plans)


def _wrap(layer: torch.nn.Module, linear: LinearMap, names: WeightMap, groups: Groups) -> ParallelLoraLinear:
    """Return the wrapper in the linear's place; make it if there is none."""
    base = find_linear(layer, linear, names, groups)
    if isinstance(base, ParallelLoraLinear):
        return base
    kind = NormColumnLora if holds_norm(base) else kind_of(linear)
    wrapped = kind(base, linear.fusion, head_layout(layer.config), groups.along(kind.axis)[0])
    parent, _, attribute = path_of(linear, names, groups).rpartition(".")
    setattr(layer.get_submodule(parent), attribute, wrapped)
    return wrapped


def _matrices(
    wrapped: ParallelLoraLinear,
    parts: tuple[PartPlan | None, ...],
    dropout: float,
    seed: int,
    dtype: torch.dtype,
    groups: Groups,
) -> AdapterMatrices:
    """Initialise A and B: each rank draws the whole matrices and keeps its slices."""
    _, rank, size = groups.along(wrapped.axis)
    adapter = AdapterMatrices(parts, dropout)
    for part in filter(None, parts):
        whole = wrapped.initial(part, seed)
        for side, matrices in (("A", adapter.lora_A), ("B", adapter.lora_B)):
            if side not in part.sides:
                continue
            split = wrapped.split_of(part, side)
            mine = whole[side] if split is None else whole[side].chunk(size, dim=split)[rank]
            parameter = torch.nn.Parameter(mine.to(dtype=dtype, device=groups.device).contiguous())
            wrapped.mark(parameter, split)
            if side == "B" and part.copies > 1:
                parameter.sequence_parallel = False  # its backward pass sums the gradient
            matrices[part.key] = parameter
    return adapter
