# SPDX-License-Identifier: Apache-2.0
"""Writing straight into parameters: where vLLM's loaders put parts of tensors, also of tensors that come in parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoint_engine.buckets.digests import begin_digests
from megarl.checkpoint_engine.buckets.filling import as_they_come, view_of
from megarl.checkpoint_engine.receiver.weights import direct, regions
from megarl.checkpoint_engine.wire import Places
from megarl.errors import WeightSyncError

RANK, SIZE = 1, 2


class Model(torch.nn.Module):
    """Loads as vLLM does on rank 1 of 2: rows of two stacked linears, columns of another, padded rows, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = torch.nn.Parameter(torch.zeros(12, 8))
        self.row = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))
        self.embedding = torch.nn.Parameter(torch.zeros(16, 8))
        self.norm = torch.nn.Parameter(torch.zeros(8))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                half = self.stacked.data.narrow(0, 6 * (name == "up"), 6)
                half.copy_(tensor.narrow(0, 6 * RANK, 6))
            elif name == "row":
                self.row.data.copy_(tensor.narrow(1, 4 * RANK, 4))
            elif name == "embedding":
                self.embedding[: len(tensor)].data.copy_(tensor)
                self.embedding[len(tensor) :].data.fill_(0)
            elif name == "scaled":
                self.norm.data.copy_(tensor + 1)
            elif name != "unused":
                assert self.norm.size() == tensor.size()
                self.norm.data.copy_(tensor)


SHAPES = {"gate": (12, 8), "up": (12, 8), "row": (8, 8), "embedding": (13, 8), "norm": (8,)}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> direct.DirectLoader:
    return make_loader(monkeypatch, "cpu")


def make_loader(monkeypatch: pytest.MonkeyPatch, device: str) -> direct.DirectLoader:
    """Return a loader of a new model; vLLM's layout takes every tensor."""
    layout = SimpleNamespace(loading=torch.no_grad)
    expected = SimpleNamespace(take=lambda name, shape: name, check_all=lambda whole: None)
    monkeypatch.setattr(direct, "layout_of", lambda model, manager: layout)
    for module in (direct, regions):
        monkeypatch.setattr(module, "Expected", lambda model, layout: expected)
    monkeypatch.setattr(regions, "set_current_vllm_config", lambda config: torch.no_grad())
    model = Model().to(device)
    return direct.DirectLoader(SimpleNamespace(get_model=lambda: model, device=device), None)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def load(loader: direct.DirectLoader, given: dict[str, torch.Tensor], limit: int, split: bool = True) -> int:
    """Load tensors by buckets of at most ``limit`` bytes; return the number of buckets."""
    buckets = list(as_they_come(given.items(), limit, split))
    for filling in buckets:
        payload = torch.zeros(filling.places.end, dtype=torch.uint8, device=filling.tensors[0].device)
        for place, tensor in zip(filling.places, filling.tensors, strict=True):
            view_of(payload, place).copy_(tensor)
        digests, found = loader._writes_of(filling.places).run(payload)
        assert found() == ([], []) and digests() == begin_digests(payload, filling.places)()
    loader._check_complete(Places(place for filling in buckets for place in filling.places), whole=True)
    return len(buckets)


@pytest.mark.parametrize("limit", [1 << 20, 200, 100])
def test_parameters_hold_what_vllms_loaders_would_have_put_there(loader: direct.DirectLoader, limit: int) -> None:
    for seed in (0, 1):
        given, theirs = tensors(seed), Model()
        assert (load(loader, given, limit) > 5) == (limit < 1000)
        theirs.load_weights(given.items())
        for mine, other in zip(loader._model.parameters(), theirs.parameters(), strict=True):
            assert mine.any() and torch.equal(mine, other)


def test_finding_places_changes_no_value_but_padding(loader: direct.DirectLoader) -> None:
    before = [parameter.data.fill_(7).clone() for parameter in loader._model.parameters()]
    for filling in as_they_come(tensors().items(), 1 << 20, True):
        loader._writes_of(filling.places)
    for old, new in zip(before, loader._model.parameters(), strict=True):
        assert torch.equal(old[:13], new[:13])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given | {"norm": torch.ones(9)}, r"vLLM refused tensor 'norm' of shape \(9,\): Assertion"),
        (
            lambda given: given | {"scaled": torch.ones(8)},
            r"refused tensor 'scaled' of shape \(8,\).*its loader computes with it",
        ),
        (lambda given: given | {"unused": torch.ones(8)}, "put no part of 'unused' into a parameter"),
        (lambda given: {name: given[name] for name in given if name != "row"}, "no tensor reached: 'row'"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(loader: direct.DirectLoader, change: Any, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        load(loader, change(tensors()), 1 << 20)


def test_a_missing_part_is_noticed(loader: direct.DirectLoader) -> None:
    buckets = list(as_they_come(tensors().items(), 200, True))
    places = [place for filling in buckets for place in filling.places]
    for filling in buckets:
        loader._writes_of(filling.places)
    last = max(index for index, place in enumerate(places) if place.name == "embedding")
    with pytest.raises(WeightSyncError, match="only some rows came of 'embedding'"):
        loader._check_complete(Places(place for index, place in enumerate(places) if index != last), whole=True)


def test_a_vector_larger_than_a_bucket_is_refused_with_advice(loader: direct.DirectLoader) -> None:
    with pytest.raises(WeightSyncError, match=r"'norm' of shape \(8,\) is larger than a bucket.*raise \S+bucket_mib"):
        load(loader, tensors(), 16)


class TritonExperts:
    """Has the name of vLLM's kernel that reads experts as the checkpoint has them."""


class OtherExperts:
    """Has the name of no kernel that does."""


class Experts(torch.nn.Module):
    """Holds experts as vLLM does, with a method that is a module too."""

    def __init__(self, kernel: type, biased: bool) -> None:
        super().__init__()
        for name in ("w13_weight", "w2_weight", *(["w13_bias"] if biased else [])):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 4)))
        self.quant_method = Method()
        self.quant_method.moe_kernel = SimpleNamespace(fused_experts=kernel())


class Method(direct.QuantizeMethodBase, torch.nn.Module):  # type: ignore[misc]
    """Changes no layout; ``Experts`` says so by its kernel."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None: ...
    def apply(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("kernel", "biased", "taken"),
    [(TritonExperts, False, True), (TritonExperts, True, False), (OtherExperts, False, False)],
)
def test_experts_are_written_to_where_their_kernel_reads_them_as_the_checkpoint_has_them(
    kernel: type, biased: bool, taken: bool
) -> None:
    experts = torch.nn.ModuleList([Experts(kernel, biased)])
    assert direct.takes_direct_writes(experts, "cpu") is taken
    assert not direct.takes_direct_writes(experts), "on a GPU only"
