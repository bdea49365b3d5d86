# SPDX-License-Identifier: Apache-2.0
"""Apply a family to one model: list the names of its linears and tensors, layer by layer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megarl.families.base import (
    EMBEDDING,
    FINAL_NORM,
    HF_LAYER,
    OUTPUT,
    STACKED_EXPERTS,
    STACKED_ROUTER,
    Family,
    LinearMap,
    VectorMap,
)


class WeightMap:
    """The tensor names of one model, from its family and its ``config.json``.

    Attributes:
        family: the family.
        hf_config: parsed ``config.json``.
        num_layers: number of transformer layers.
        num_experts: number of routed experts in a sparse layer; 0 for dense models.
    """

    def __init__(self, family: Family, hf_config: Mapping[str, Any]) -> None:
        self.family, self.hf_config = family, hf_config
        self.num_layers: int = hf_config["num_hidden_layers"]
        self.num_experts = family.moe.count(hf_config) if family.moe else 0

    def vectors(self, layer: int) -> tuple[VectorMap, ...]:
        """Return the replicated tensors of a layer (index from 0)."""
        return tuple(vector for vector in self.family.vectors if vector.in_layer(self.hf_config, layer))

    def sparse(self, layer: int) -> bool:
        """Return True if a layer (index from 0) has experts."""
        return self.family.moe is not None and self.family.moe.sparse(self.hf_config, layer)

    def linears(self, layer: int) -> tuple[LinearMap, ...]:
        """Return every linear of a layer (index from 0), including all ranks' experts, in one order on every rank."""
        moe = self.family.moe
        attention = tuple(linear for linear in self.family.attention if linear.in_layer(self.hf_config, layer))
        if moe is None or not self.sparse(layer):
            return attention + self.family.mlp
        experts = tuple(
            dataclasses.replace(linear, hf=tuple(name.format(index) for name in linear.hf), expert=index)
            for index in range(self.num_experts)
            for linear in moe.experts
        )
        return attention + moe.linears + experts

    def linear_names(self) -> list[str]:
        """Return the Hugging Face names of every linear of the model, over all layers and ranks."""
        return [
            f"{HF_LAYER.format(layer)}{hf}"
            for layer in range(self.num_layers)
            for linear in self.linears(layer)
            for hf in linear.hf
        ]

    def tensor_names(self) -> set[str]:
        """Return the Hugging Face names of every tensor of the model, over all layers and ranks."""
        names = {EMBEDDING[1], FINAL_NORM.hf}
        if not self.hf_config["tie_word_embeddings"]:
            names.add(OUTPUT[1])
        for layer in range(self.num_layers):
            prefix = HF_LAYER.format(layer)
            names |= {f"{prefix}{vector.hf}" for vector in self.vectors(layer)}
            for linear in self.linears(layer):
                names |= {f"{prefix}{hf}.weight" for hf in linear.hf}
                if linear.bias(self.hf_config, layer):
                    names |= {f"{prefix}{hf}.bias" for hf in linear.hf}
        return names

    def optional_names(self, names: Iterable[str]) -> set[str]:
        """Return those of a folder's tensor names that do not belong to the model and may be ignored.

        They are a copy of tied embeddings (a reader of values must check that it is one), RoPE's frequencies in old
        folders, and DeepSeek-V3's layers that predict further tokens.
        """
        names = set(names)
        extra = {
            HF_LAYER.format(self.num_layers + index)
            for index in range(self.hf_config.get("num_nextn_predict_layers") or 0)
        }
        predicting = tuple(prefix for prefix in extra if f"{prefix}eh_proj.weight" in names)
        copies = {OUTPUT[1]} if self.hf_config["tie_word_embeddings"] else set()
        return copies | {name for name in names if name.endswith(".rotary_emb.inv_freq") or name.startswith(predicting)}

    def parameter_names(self) -> dict[str, list[str]]:
        """Map transformers 5's name of each of the layers' weight matrices to the ``linear_names`` that it holds.

        A layer's experts are stacked in two matrices: one with gate and up of every expert, expert by expert, and one
        with down. The linears are listed in that order.
        """
        linears_of: dict[str, list[str]] = {}
        for layer in range(self.num_layers):
            prefix = HF_LAYER.format(layer)
            for linear in self.linears(layer):
                if linear.expert is not None:
                    stack = STACKED_EXPERTS[0 if linear.fusion == "gated" else 1]
                    linears_of.setdefault(f"{prefix}{stack}", []).extend(f"{prefix}{hf}" for hf in linear.hf)
                    continue
                for hf in linear.hf:
                    name = STACKED_ROUTER if linear.is_router else hf
                    linears_of[f"{prefix}{name}.weight"] = [f"{prefix}{hf}"]
        return linears_of

    def router_names(self) -> set[str]:
        """Return those of ``linear_names`` that are routers."""
        return self._named(lambda linear: linear.is_router)

    def expert_names(self) -> set[str]:
        """Return those of ``linear_names`` that belong to routed experts."""
        return self._named(lambda linear: linear.expert is not None)

    @property
    def experts_by_module(self) -> bool:
        """True if the model has experts that ``target_modules`` can name; see ``MoeMap.by_module``."""
        return self.family.moe is not None and self.family.moe.by_module

    def shadowed_names(self) -> set[str]:
        """Return names outside the routed experts whose last component is that of a routed expert's linear.

        They belong to shared experts and to the MLP of layers without experts. Where transformers 5 stacks the experts,
        PEFT (0.21) takes ``gate_proj`` in ``target_modules``, with or without a path, for the routed experts' only. The
        linears listed here can be adapted by ``target_parameters``.
        """
        if not self.experts_by_module:
            return set()
        experts = self.expert_names()
        shared = {name.rpartition(".")[2] for name in experts}
        return {name for name in self.linear_names() if name.rpartition(".")[2] in shared} - experts

    def target_names(self) -> list[str]:
        """Return those of ``linear_names`` that ``target_modules`` can name."""
        hidden = self.shadowed_names() if self.experts_by_module else self.expert_names() | self.router_names()
        return [name for name in self.linear_names() if name not in hidden]

    def _named(self, wanted: Callable[[LinearMap], bool]) -> set[str]:
        return {
            f"{HF_LAYER.format(layer)}{hf}"
            for layer in range(self.num_layers)
            for linear in self.linears(layer)
            if wanted(linear)
            for hf in linear.hf
        }
