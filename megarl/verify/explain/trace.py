# SPDX-License-Identifier: Apache-2.0
"""Record outputs of modules, token by token, on both sides, to find the first that differs.

Both sides run ``samples.distinct_samples``, in which a token's id gives its row of the trace. Packing, padding,
pipeline stages and every split of tokens over ranks therefore have no effect on a trace. Names are Hugging Face's. A
linear whose input was computed by several ranks (attention's output, a gated MLP's) is traced on its input too, because
no module lies in between.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megarl.families import WeightMap
from megarl.families.base import HF_LAYER, LinearMap
from megarl.model.megatron_model import MegatronModel
from megarl.model.step.compiled import uncompiled
from megarl.model.weights.base_tensors import layers_of
from megarl.model.weights.fusion import head_layout, part_copies, part_views
from megarl.parallel.groups import Groups, gather_full
from megarl.types import Sample
from megarl.verify.inputs.samples import token_places

# Maps names to tensors [tokens, features], in forward order.
Trace = dict[str, torch.Tensor]
# Split of a rank's tensor [tokens, features] over TP: "features", or "tokens" (only under SP).
Split = Literal["features", "tokens"]

EMBEDDING, FINAL_NORM, LOGPROBS = "model.embed_tokens", "model.norm", "lm_head"
INPUT = "input of {}"
# transformers' name of the module of a layer that holds experts; files may have another.
SPARSE_BLOCK, ROUTER = "mlp", "mlp.gate"


def trace_reference(model: torch.nn.Module, names: WeightMap, samples: list[Sample], vocab: int) -> Trace:
    """Trace the reference, sample by sample.

    Args:
        model: the reference, from ``load_reference``, with an adapter.
        names: the model's tensor names.
        samples: from ``distinct_samples``.
        vocab: vocabulary size.

    Returns:
        The trace, in the order in which the modules ran.
    """
    places = torch.from_numpy(token_places(samples, vocab))
    trace: Trace = {}
    fed: torch.Tensor

    def keep(name: str, value: torch.Tensor) -> None:
        rows = value.detach().reshape(fed.shape[0], -1).cpu()
        whole = trace.setdefault(name, rows.new_zeros(int(places.max()) + 1, rows.shape[1]))
        kept = places[fed] >= 0
        whole[places[fed][kept]] = rows[kept]

    handles = [hook for name, hook in _reference_hooks(model.get_base_model(), names, keep)]
    try:
        with torch.no_grad():
            for sample in samples:
                fed = torch.from_numpy(sample.tokens[:-1])
                model(input_ids=fed[None].to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _reference_hooks(
    base: torch.nn.Module, names: WeightMap, keep: Callable[[str, torch.Tensor], None]
) -> Iterator[tuple[str, Any]]:
    def output(name: str, module: str, read: Callable[[Any], torch.Tensor] = lambda out: out) -> tuple[str, Any]:
        return name, base.get_submodule(module).register_forward_hook(lambda m, i, out: keep(name, read(out)))

    yield output(EMBEDDING, EMBEDDING)
    for layer in range(names.num_layers):
        prefix = HF_LAYER.format(layer)
        for norm in _norms(names, layer):
            yield output(f"{prefix}{norm}", f"{prefix}{norm}")
        for linear in _traced(names, layer):
            if linear.is_router:
                yield output(f"{prefix}{linear.hf[0]}", f"{prefix}{ROUTER}", lambda out: _dense(out, names.num_experts))
                continue
            for hf in linear.hf:
                module = base.get_submodule(f"{prefix}{hf}")
                yield output(f"{prefix}{hf}", f"{prefix}{hf}")
                if linear.split == "row":
                    name = INPUT.format(f"{prefix}{hf}")
                    yield name, module.register_forward_pre_hook(lambda m, given, name=name: keep(name, given[0]))
        if names.sparse(layer):
            yield output(f"{prefix}{SPARSE_BLOCK}", f"{prefix}{SPARSE_BLOCK}", _first)
        yield output(prefix.removesuffix("."), prefix.removesuffix("."), _first)
    yield output(FINAL_NORM, FINAL_NORM)


def _traced(names: WeightMap, layer: int) -> list[LinearMap]:
    """Return the linears of a layer that are modules on both sides; transformers has routed experts in one tensor."""
    moe = names.family.moe
    inside = moe.linears if moe and names.sparse(layer) else ()
    return [
        linear
        for linear in names.linears(layer)
        if linear.expert is None and (linear not in inside or linear.is_router)
    ]


def _dense(out: tuple[torch.Tensor, ...], experts: int) -> torch.Tensor:
    """Convert transformers' router output to weights ``[tokens, experts]``, 0 for experts that are not chosen."""
    _, weights, indices = out
    return weights.new_zeros(weights.shape[0], experts).scatter(1, indices, weights)


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@dataclass
class _Calls:
    """Inputs and outputs of one chunk, micro-batch by micro-batch."""

    tokens: list[torch.Tensor]
    values: dict[str, list[torch.Tensor]]
    splits: dict[str, Split]
    copies: dict[str, int]


def trace_model(
    model: MegatronModel, names: WeightMap, samples: list[Sample], *, adapter: bool = True
) -> tuple[Trace, list[np.ndarray]]:
    """Trace megarl on the samples, with the adapter or without. Collective.

    Returns:
        ``(trace of this pipeline stage's modules, logprobs of the samples)``, the same on all ranks of a stage.
    """
    calls, handles = [], []
    for chunk in model.chunks:
        seen = _Calls([], {}, {}, {})
        calls.append(seen)
        handles += _model_hooks(chunk, names, seen)
    try:
        with uncompiled(model.chunks):
            logprobs = model.forward(model.pack(samples), adapter=adapter)
    finally:
        for handle in handles:
            handle.remove()
    places = torch.from_numpy(token_places(samples, model.hf_config["vocab_size"])).to(model.groups.device)
    trace: Trace = {}
    for seen in calls:
        trace |= _assemble(seen, places, model.groups, model.config.parallel.sequence_parallel)
    return trace, logprobs


def _model_hooks(chunk: Any, names: WeightMap, seen: _Calls) -> list[Any]:
    def keep(name: str, value: torch.Tensor, split: Split, copies: int = 1) -> None:
        # A clone, because without gradients mcore adds residuals in place.
        seen.values.setdefault(name, []).append(value.detach().reshape(value.shape[0], -1).clone())
        seen.splits[name], seen.copies[name] = split, copies

    def output(module: torch.nn.Module, name: str, split: Split) -> Any:
        return module.register_forward_hook(lambda m, i, out: keep(name, _with_bias(out), split))

    def remember(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        seen.tokens.append(kwargs["input_ids"].reshape(-1))

    handles = [chunk.register_forward_pre_hook(remember, with_kwargs=True)]
    if chunk.pre_process:
        handles.append(output(chunk.embedding, EMBEDDING, "tokens"))
    for index, layer in layers_of(chunk):
        prefix = HF_LAYER.format(index)
        for hf, candidates in _norms(names, index).items():
            if (norm := _norm_module(layer, candidates)) is not None:
                copies = head_layout(layer.config).copies if hf.endswith("k_norm") else 1
                handles.append(norm.register_forward_hook(_norm_output(keep, f"{prefix}{hf}", copies)))
        for linear in _traced(names, index):
            handles += _linear_hooks(layer, linear, prefix, keep)
        if names.sparse(index):
            handles.append(output(layer.mlp, f"{prefix}{SPARSE_BLOCK}", "tokens"))
        handles.append(layer.register_forward_hook(_whole_layer(keep, prefix.removesuffix("."))))
    if chunk.post_process:
        handles.append(output(chunk.decoder.final_layernorm, FINAL_NORM, "tokens"))
    return handles


def _whole_layer(keep: Callable, name: str) -> Callable:
    """Keep the hidden states of a layer's output; mcore's layers return (hidden states, context)."""
    return lambda module, given, out: keep(name, _first(out), "tokens")


def _norms(names: WeightMap, layer: int) -> dict[str, tuple[str, ...]]:
    """Map the path of each norm's module in the reference to the possible names of its weight in mcore."""
    vectors = [vector for vector in names.vectors(layer) if vector.hf.endswith(".weight")]
    return {vector.hf.removesuffix(".weight"): vector.mcore for vector in vectors}


def _norm_output(keep: Callable, name: str, copies: int) -> Callable:
    """Keep a norm's output: this rank's heads ``[T, 1, heads / TP, head_dim]``, or whole tokens."""
    return lambda module, given, out: keep(name, out, "features" if out.ndim == 4 else "tokens", copies)


def _norm_module(layer: torch.nn.Module, candidates: tuple[str, ...]) -> torch.nn.Module | None:
    """Return the module that has a norm's weight; None if Transformer Engine fused it into a linear."""
    modules = dict(layer.named_modules())
    for name in candidates:
        path, _, attribute = name.rpartition(".")
        if attribute == "weight" and getattr(modules.get(path), "weight", None) is not None:
            return modules[path]
    return None


def _linear_hooks(layer: Any, linear: LinearMap, prefix: str, keep: Callable) -> list[Any]:
    module = layer.get_submodule(linear.mcore)
    targets = [f"{prefix}{hf}" for hf in linear.hf]
    if linear.is_router:
        router = getattr(module, "base_layer", module)
        return [router.register_forward_hook(lambda m, i, out: keep(targets[0], out[0], "tokens"))]
    if linear.split == "row":
        return [
            module.register_forward_pre_hook(lambda m, given: keep(INPUT.format(targets[0]), given[0], "features")),
            module.register_forward_hook(lambda m, i, out: keep(targets[0], _with_bias(out), "tokens")),
        ]
    heads = head_layout(layer.config)

    def parts(module: Any, given: Any, out: Any) -> None:
        fused = _with_bias(out)
        rows = fused.reshape(fused.shape[0], -1).t().contiguous()
        views, copies = part_views(rows, linear.fusion, heads), part_copies(linear.fusion, heads)
        for name, part, count in zip(targets, views, copies, strict=True):
            keep(name, part.reshape(-1, rows.shape[1]).t(), "features", count)

    return [module.register_forward_hook(parts)]


def _with_bias(out: Any) -> torch.Tensor:
    """Add the bias: mcore's linears return (output, bias that is still to be added)."""
    if not isinstance(out, tuple):
        return out
    return out[0] if out[1] is None else out[0] + out[1]


def _assemble(seen: _Calls, places: torch.Tensor, groups: Groups, sequence_parallel: bool) -> Trace:
    """Assemble whole rows from this chunk's parts: over TP, then over the ranks with other tokens."""
    fed = torch.cat(seen.tokens)
    kept = places[fed] >= 0
    rows = places[fed][kept]
    trace: Trace = {}
    for name, parts in seen.values.items():
        features = seen.splits[name] == "features"
        if features or sequence_parallel:
            parts = [gather_full(part, 1 if features else 0, groups.tensor) for part in parts]
        if (copies := seen.copies[name]) > 1:
            parts = [part.unflatten(1, (groups.topology.tensor, -1))[:, ::copies].flatten(1) for part in parts]
        value = torch.cat(parts)
        whole = value.new_zeros(int(places.max()) + 1, value.shape[1])
        whole[rows] = value[kept]
        dist.all_reduce(whole, group=groups.data_context)
        trace[name] = whole.cpu()
    return trace
