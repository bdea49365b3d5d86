# SPDX-License-Identifier: Apache-2.0
"""Adapt the word embedding and the output layer, whose vocabulary is split over TP and padded.

Both can be adapted together, and with tied base weights, as in PEFT: the adapter of one never changes the other.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from peft import LoraConfig

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.layers.matrices import AdapterMatrices, PartPlan, generator_of, mark_parameter
from megarl.lora.layers.parallel_linear import ColumnParallelLora, ParallelLoraLinear
from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE
from megarl.model.weights.base_tensors import unwrap
from megarl.model.weights.fusion import head_layout
from megarl.parallel.groups import Groups
from megarl.peft.names import BASE_WEIGHT, PREFIX
from megarl.peft.rules import rank_and_scaling


class EmbeddingLora(ParallelLoraLinear):
    """Adapter of the word embedding. A is ``[r, V]``, split along the vocabulary; B is ``[H, r]``, replicated."""

    split_A = 1

    def forward(self, ids: torch.Tensor) -> Any:
        """Map ids ``[1, T]`` int64 to the base's shape: ``[T/TP, 1, H]`` under SP, else ``[1, T, H]``."""
        out = self.base_layer(ids)
        return self.adapt(self.current(), out, ids) if self.active else out

    def adapt(self, adapter: AdapterMatrices, out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Look up columns of A by token, and sum them over the shards at width r. PEFT has no dropout here."""
        rows = adapter.only.rows
        row = ids - self.group.rank() * rows
        here = (row >= 0) & (row < rows)
        low = F.embedding(row * here, adapter.lora_A[adapter.only.key].T) * here[..., None]
        if self.reduce_scatter_embeddings:
            low = reduce_scatter_to_sequence_parallel_region(low.transpose(0, 1).contiguous(), group=self.group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.group)
        return out + adapter.raised(low)

    def initial(self, part: PartPlan, seed: int) -> dict[str, torch.Tensor]:
        """Initialise as PEFT does for embeddings: A zero, B standard normal."""
        matrix_b = torch.empty(part.out_features, part.rank).normal_(generator=generator_of(part.name, seed))
        return {"A": torch.zeros(part.rank, part.padded or part.in_features), "B": matrix_b}

    def mark(self, matrix: torch.nn.Parameter, split: int | None) -> None:
        """Mark the matrix. Under SP, B sees this rank's tokens only; A's gradient is complete where the token is."""
        mark_parameter(matrix, split, bool(self.reduce_scatter_embeddings))

    def factors(self, adapter: AdapterMatrices, part: PartPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of the table ``[V, H]``, which gains ``(B @ A).T = A.T @ B.T``."""
        return adapter.lora_B[part.key].T, adapter.lora_A[part.key].T


class OutputLora(ColumnParallelLora):
    """Adapter of the output layer. A is ``[r, H]``, replicated; B is ``[V, r]``, split along the vocabulary."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits, for models that compute all of them at once; megarl's own models call ``deltas`` instead."""
        out, bias = self.base_layer(hidden, *args, **kwargs)
        if self.active:
            adapter = self.current()
            delta = adapter.raised(self.low(adapter, hidden))
            gathered = kwargs.get("runtime_gather_output")
            if self.gather_output if gathered is None else gathered:
                delta = gather_from_tensor_model_parallel_region(delta, group=self.group)
            out = out + delta
        return out, bias

    def deltas(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the adapter's addition to the logits of some tokens, as factors; see ``loss.token_logprobs``.

        Args:
            hidden: input of the output layer, ``[T, 1, H]`` (``[T/TP, 1, H]`` under SP).
            positions: positions of those tokens among T, int64 ``[R]``.

        Returns:
            ``([R, r], [V/TP, r])``; an empty list if no adapter is active.
        """
        if not self.active:
            return []
        adapter = self.current()
        low = self.low(adapter, hidden).squeeze(1).index_select(0, positions) * adapter.only.scaling
        return [(low, adapter.lora_B[adapter.only.key])]


# Hugging Face module -> (adapter class, the mcore class that it wraps).
KINDS: dict[str, tuple[type[ParallelLoraLinear], type[torch.nn.Module]]] = {
    EMBED_MODULE: (EmbeddingLora, VocabParallelEmbedding),
    OUTPUT_MODULE: (OutputLora, ColumnParallelLinear),
}


def plan_vocabulary(
    models: Sequence[GPTModel],
    config: LoraConfig,
    chosen: Collection[str],
    hf_config: Mapping[str, Any],
    groups: Groups,
) -> list[tuple[PartPlan, Callable[[], ParallelLoraLinear]]]:
    """Plan the adapters of the vocabulary on this rank, each with a function that wraps its layer. Changes nothing.

    Raises:
        UnsupportedError: a layer class is not supported.
    """
    plans: list[tuple[PartPlan, Callable[[], ParallelLoraLinear]]] = []
    for model in models:
        for name, holder, attribute in _places(model):
            if name not in chosen:
                continue
            base, (_, expected) = unwrap(getattr(holder, attribute)), KINDS[name]
            if not isinstance(base, expected):
                raise UnsupportedError(f"{name} is a {type(base).__name__}; supported is mcore's {expected.__name__}")
            table = _output_weight(model) if name == OUTPUT_MODULE else base.weight
            part = _part(name, config, table, hf_config, groups)
            plans.append((part, partial(_wrapped, name, holder, attribute, table, groups)))
    return plans


def _wrapped(
    name: str, holder: torch.nn.Module, attribute: str, table: torch.Tensor, groups: Groups
) -> ParallelLoraLinear:
    """Return the wrapper in the layer's place; make it if there is none."""
    base = getattr(holder, attribute)
    if isinstance(base, ParallelLoraLinear):
        return base
    wrapped = KINDS[name][0](base, "single", head_layout(holder.config), groups.tensor)
    # In a tuple, because torch would register a bare parameter as the wrapper's own.
    wrapped.table = (table,)
    setattr(holder, attribute, wrapped)
    return wrapped


def check_tables(source: Any, names: Iterable[str], layers: Mapping[str, ParallelLoraLinear], groups: Groups) -> None:
    """Refuse an adapter of another model, by the base weights that PEFT stores beside an adapted vocabulary.

    Args:
        source: an opened safetensors file.
        names: names of the stored base weights in the file.
        layers: maps Hugging Face modules to this rank's adapter layers.

    Raises:
        AdapterError: a stored weight differs from the model's.
    """
    for name in names:
        module = name.removeprefix(PREFIX).removesuffix(BASE_WEIGHT)
        if module not in layers:
            continue
        (table,) = layers[module].table
        rows = source.get_slice(name)
        start = groups.tensor_rank * len(table)
        mine = rows[start : start + len(table)]
        if not torch.equal(mine.to(table), table[: len(mine)]):
            raise AdapterError(f"'{name}' differs from the model's own weight; the adapter belongs to another model")


def _places(model: GPTModel) -> list[tuple[str, torch.nn.Module, str]]:
    """Return (module, its parent, its attribute there) for the embedding and output layer that this chunk holds."""
    places: list[tuple[str, torch.nn.Module, str]] = []
    if model.pre_process:
        places.append((EMBED_MODULE, model.embedding, "word_embeddings"))
    if model.post_process:
        places.append((OUTPUT_MODULE, model, "output_layer"))
    return places


def _output_weight(model: GPTModel) -> torch.Tensor:
    """Return the output layer's weight, or the embedding's where they are tied."""
    weight = model.output_layer.weight
    return model.shared_embedding_or_output_weight() if weight is None else weight


def _part(
    name: str, config: LoraConfig, weight: torch.Tensor, hf_config: Mapping[str, Any], groups: Groups
) -> PartPlan:
    rank, scaling = rank_and_scaling(config, name)
    vocab, padded = hf_config["vocab_size"], weight.shape[0] * groups.topology.tensor
    sizes = (weight.shape[1], vocab) if name == OUTPUT_MODULE else (vocab, weight.shape[1])
    return PartPlan(name, rank, scaling, *sizes, weight.shape[0], padded=padded)
