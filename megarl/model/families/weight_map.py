"""A family applied to one model: which linears each of its layers has."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megarl.model.families.base import HF_LAYER, Family, LinearMap, VectorMap


class WeightMap:
    """The names of one model, from its family and its ``config.json``.

    Attributes:
        family: the mapping.
        hf_config: parsed ``config.json``.
        num_layers: transformer layers.
        num_experts: routed experts of a sparse layer; 0 for dense models.
    """

    def __init__(self, family: Family, hf_config: Mapping[str, Any]) -> None:
        self.family, self.hf_config = family, hf_config
        self.num_layers: int = hf_config["num_hidden_layers"]
        self.num_experts = family.moe.count(hf_config) if family.moe else 0

    @property
    def vectors(self) -> tuple[VectorMap, ...]:
        """Replicated tensors of every layer."""
        return self.family.vectors

    def sparse(self, layer: int) -> bool:
        """Whether a layer (index from 0) has experts."""
        return self.family.moe is not None and self.family.moe.sparse(self.hf_config, layer)

    def linears(self, layer: int) -> tuple[LinearMap, ...]:
        """Every linear of a layer (index from 0), the experts of all ranks one by one, in one order on every rank."""
        moe = self.family.moe
        if moe is None or not self.sparse(layer):
            return self.family.attention + self.family.mlp
        experts = tuple(
            dataclasses.replace(linear, hf=tuple(name.format(index) for name in linear.hf), expert=index)
            for index in range(self.num_experts)
            for linear in moe.experts
        )
        return self.family.attention + moe.linears + experts

    def linear_names(self) -> list[str]:
        """Hugging Face names of every linear of the model, over all layers and ranks."""
        return [
            f"{HF_LAYER.format(layer)}{hf}"
            for layer in range(self.num_layers)
            for linear in self.linears(layer)
            for hf in linear.hf
        ]

    def router_names(self) -> set[str]:
        """Those of ``linear_names`` that are routers."""
        return self._named(lambda linear: linear.split == "replicated")

    def expert_names(self) -> set[str]:
        """Those of ``linear_names`` that belong to routed experts."""
        return self._named(lambda linear: linear.expert is not None)

    def dense_mlp_names(self) -> set[str]:
        """Those of ``linear_names`` that belong to the MLP of a layer without experts."""
        return self._named(lambda linear: linear in self.family.mlp)

    def _named(self, wanted: Callable[[LinearMap], bool]) -> set[str]:
        return {
            f"{HF_LAYER.format(layer)}{hf}"
            for layer in range(self.num_layers)
            for linear in self.linears(layer)
            if wanted(linear)
            for hf in linear.hf
        }
