# SPDX-License-Identifier: Apache-2.0
"""Test what a trainer lends: megarl's models hold in one piece what vLLM fuses, except q, k and v."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.build import build_model
from megarl.checkpoint_engine import loan
from megarl.checkpoint_engine.choice import own_memory
from megarl.checkpoint_engine.loan import Held, Lent, Loan, joined, lend, loans_of
from megarl.errors import WeightSyncError
from megarl.model.trained_model import TrainedModel
from megarl.parallel.groups import destroy_groups
from tests.helpers.models import make_model


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrainedModel]:
    make_model(tmp_path, request.param, tied=False)
    section = {"path": str(tmp_path), "dtype": "float32"}
    yield build_model(section, lora={"r": 4, "target_modules": "all-linear"}, train={"device": "cpu"})
    destroy_groups()


def test_a_model_lends_its_weights_where_they_are_and_fused_ones_in_one_piece(
    model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: [whole])
    sent = dict(model.weights_to_send("base"))
    found = lend(model.held_base(), "cpu")
    assert [one.name for one in found.tensors if "q_proj" in one.name] == []
    for one in found.tensors:
        [piece] = found.handles[one.memory]
        tensor = sent[one.name].value()
        assert one.shape == tensor.shape and torch.Size(one.size).numel() == tensor.numel() and one.start == (0, 0)
        part = piece[one.offset : one.offset + tensor.nbytes].view(tensor.dtype).view(one.shape)
        assert part.data_ptr() == tensor.data_ptr() and torch.equal(part, tensor)
    by_name = {one.name: one for one in found.tensors}
    for name, one in by_name.items():
        if "gate_proj" in name:
            check_next(one, by_name[name.replace("gate_proj", "up_proj")])
        if ".experts.0.down_proj" in name:
            check_next(one, by_name[name.replace("experts.0.", "experts.1.")])


def check_next(first: Lent, second: Lent) -> None:
    """Check that a tensor begins where another one ends."""
    assert first.memory == second.memory
    assert second.offset == first.offset + torch.Size(first.shape).numel() * 4


def held(name: str, view: torch.Tensor, shape: tuple[int, ...] = (), *part: slice) -> Held:
    """Return a weight that is held whole, unless a part is given."""
    shape = shape or tuple(view.shape)
    return Held(name, shape, part or (slice(None),) * len(shape), view)


def test_what_cannot_be_lent_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: whole.numpy().tobytes())
    whole = torch.arange(12.0).view(3, 4)
    given = [held("rows", whole[1:]), held("columns", whole[:, 1:]), held("steps", torch.arange(3))]
    [copy] = loans_of(lend(given, "cpu").to_bytes())
    rows = Lent("rows", "float32", (2, 4), 0, 16, (0, 0), (2, 4))
    assert copy == Loan([rows], [whole.numpy().tobytes()], own_memory())
    with pytest.raises(WeightSyncError, match="share_base is true, but the trainer holds 'rows' in memory of cpu"):
        lend(given)
    with pytest.raises(WeightSyncError, match="no base weight of the trainer lies in one piece"):
        lend([held("columns", whole[:, 1:])], "cpu")


def test_parts_of_weights_are_those_of_matrices_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: b"")
    here = torch.zeros(24)
    given = [
        held("columns", here.view(6, 4), (6, 8), slice(None), slice(4, 8)),
        held("rows and padding", here.view(4, 6), (7, 6), slice(4, 7), slice(None)),
        held("padding only", here.view(4, 6), (7, 6), slice(7, 7), slice(None)),
        held("vector", here, (48,), slice(24, 48)),
        held("stack", here.view(2, 3, 4), (4, 3, 4), slice(2, 4), slice(None), slice(None)),
        held("heads", here.view(1, 2, 3, 4), (12, 4), slice(6, 12), slice(None)),
    ]
    lent = {one.name: (one.start, one.size) for one in lend(given, "cpu").tensors}
    assert lent == {
        "columns": ((0, 4), (6, 4)),
        "rows and padding": ((4, 0), (3, 6)),
        "vector": ((0, 24), (1, 24)),
        "stack": ((6, 0), (6, 4)),
        "heads": ((6, 0), (6, 4)),
    }


def test_the_loans_of_ranks_are_joined_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: b"")
    loans = [lend([held(name, torch.zeros(2, 2))], "cpu").to_bytes() for name in ("first", "second")]
    assert [one.tensors[0].name for one in loans_of(joined(loans))] == ["first", "second"]
    assert joined(loans[:1]) == loans[0]
