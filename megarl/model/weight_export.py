# SPDX-License-Identifier: Apache-2.0
"""Export whole tensors of a sharded model, under the names of PEFT's and Hugging Face's files."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.checkpoint_engine.mixin import CheckpointEngineMixin, Held, Kind, Named
from megarl.model.adapter import Adapter, Optimizer
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.model.weights.streaming import stream_full
from megarl.model.weights.sums import deferred
from megarl.parallel.groups import Groups


class _Kept(NamedTuple):
    """Tensors that are listed once, and what they were listed from.

    Attributes:
        adapters: the active adapter, and all adapters.
        parameters: the active adapter's, and the base's.
        places: their addresses.
        tensors: the tensors; None if they cannot be kept.
    """

    adapters: tuple[Adapter, ...]
    parameters: list[torch.Tensor]
    places: list[int]
    tensors: tuple | None


class WeightExport(CheckpointEngineMixin):
    """The part of a trained model that gives its weights away. The exports are collectives."""

    groups: Groups
    adapter: Adapter
    adapters: dict[str, Adapter]
    version: int
    _optimizers: dict[str, Optimizer]
    # By kind of weights.
    _kept: dict[str, _Kept] | None = None

    def export_weights(self, adapter_only: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Stream whole tensors on every rank. All ranks must consume the stream to its end, once.

        Args:
            adapter_only: True yields the adapter under the names of PEFT's files; False the base weights, without the
                adapter, under Hugging Face's names.
        """
        self._finish_param_gather()
        if not adapter_only:
            return stream_full(self._base_tensors(), self.groups)
        views = self._keep("adapter", tuple, self._views)
        return self.adapter.export() if views is None else views

    def held_base(self) -> Iterator[Held]:
        """See ``CheckpointEngineMixin``. What is computed, or held by another rank, is left out."""
        for tensor in self._base_tensors():
            if tensor.view is not None:
                _, rank, size = self.groups.along(tensor.axis)
                yield Held(tensor.name, tensor.shape, tensor.local_slice(rank, size), tensor.view.detach())

    def weights_to_send(self, kind: Kind) -> Iterable[Named]:
        """See ``CheckpointEngineMixin``. Base and merged weights that one rank holds whole are deferred."""
        if kind != "adapter":
            self._finish_param_gather()
            found = self._keep(kind, self._base_parameters, lambda: self._deferred(merged=kind == "merged"))
            if found is not None:
                return found
        return super().weights_to_send(kind)

    def _keep(
        self, kind: str, base: Callable[[], Iterable[torch.Tensor]], make: Callable[[], tuple | None]
    ) -> tuple | None:
        """Return what ``make`` returned, as long as the parameters stay where they are; None if ranks share tensors.

        To list tensors takes some 50 microseconds for each.

        Args:
            kind: what it is kept under.
            base: returns the base's parameters, if it is made of them.
            make: lists the tensors; None if that cannot be kept.
        """
        layout = self.groups.topology
        if max(layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor) > 1:
            return None  # every rank must take part
        self._kept = self._kept or {}
        adapters = (self.adapter, *self.adapters.values())
        kept = self._kept.get(kind)
        if kept is None or (kept.adapters, kept.places) != (adapters, _places(kept.parameters)):
            parameters = [*(parameter for _, parameter in self.adapter.parameters()), *base()]
            kept = self._kept[kind] = _Kept(adapters, parameters, _places(parameters), make())
        return kept.tensors

    def _views(self) -> tuple[Named, ...] | None:
        """Return the whole adapter as views of its parameters; None if a tensor has to be stacked."""
        exported = tuple(self.adapter.export())
        return exported if self._in_parameters(tensor for _, tensor in exported) else None

    def _deferred(self, *, merged: bool) -> tuple[Named, ...] | None:
        """Return the base's tensors, merged or not, to be read when they are sent; None if one has to be computed."""
        found = deferred(self._listed(changed_only=merged, merged=merged))
        updates = [tensor.update for _, tensor in found or () if tensor.update]
        factors = (factor for update in updates for factor in (update.matrix_a, update.matrix_b))
        return found if self._in_parameters(factors) else None

    def _in_parameters(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if all are views of the adapter's parameters, so that they have the values of every version."""
        places = {parameter.untyped_storage().data_ptr() for _, parameter in self.adapter.parameters()}
        return all(tensor.untyped_storage().data_ptr() in places for tensor in tensors)

    def export_adapter_config(self) -> dict[str, Any]:
        """The active adapter's ``adapter_config.json``; not to be changed."""
        return self.adapter.adapter_config()

    def policy_version(self) -> int:
        """The active adapter's policy version."""
        return self.version

    def export_merged(self, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream base plus adapter under Hugging Face's names, merged out of place in fp32 and rounded once.

        Where the adapter changes only one of two tied embeddings, both are streamed: the merged model no longer ties
        them.

        Args:
            changed_only: True streams only the blocks (``block_of``) that an adapter of this model changes, whichever
                is active: a receiver may hold another one's. Every other tensor of the merged model is the base's.
        """
        self._finish_param_gather()
        return stream_full(self._listed(changed_only=changed_only, merged=True), self.groups)

    def _listed(self, *, changed_only: bool, merged: bool) -> list[ShardedTensor]:
        """Return this rank's base tensors, merged or not, of all blocks or of those that an adapter changes."""
        tensors = self._base_tensors(untied=merged and self.adapter.unties)
        if changed_only:
            changed = {block_of(name) for adapter in self.adapters.values() for name in adapter.adapted()}
            tensors = [tensor for tensor in tensors if block_of(tensor.name) in changed]
        return self.adapter.merged(tensors) if merged else tensors

    def save_adapter(self, path: str | Path, experts: str = "as_trained") -> None:
        """Write the adapter as a PEFT directory.

        Args:
            path: the directory; replaced if it exists.
            experts: how adapters of experts are written, see ``lora.save_experts``.

        Raises:
            AdapterError: the directory cannot be written.
        """
        self._finish_param_gather()
        self.adapter.save(path, experts)

    def _finish_param_gather(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.finish_param_gather()

    def _base_tensors(self, *, untied: bool = False) -> list[ShardedTensor]:
        """Return this rank's base tensors, without any adapter, under Hugging Face's names.

        Args:
            untied: True lists a tied output layer too, as a tensor of its own.
        """
        raise NotImplementedError

    def _base_parameters(self) -> Iterable[torch.Tensor]:
        """Return every parameter that ``_base_tensors`` reads; more do no harm."""
        raise NotImplementedError


def _places(parameters: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, parameters))


def block_of(name: str) -> str:
    """Return the part of a layer that a tensor or module belongs to: ``model.layers.3.mlp``.

    What vLLM fuses or stacks (q, k and v; gate and up; experts) lies in one block, so that it can load whole blocks.
    A name outside the layers is a block of its own.
    """
    layer = re.match(r"(.*?\.\d+\.[^.]+)(\.|$)", name)
    return layer[1] if layer else name.removesuffix(".weight")
