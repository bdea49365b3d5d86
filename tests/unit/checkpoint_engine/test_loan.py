# SPDX-License-Identifier: Apache-2.0
"""Test what a trainer lends: megarl's models hold in one piece what vLLM fuses, except q, k and v."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.build import build_model
from megarl.checkpoint_engine import loan
from megarl.checkpoint_engine.loan import Lent, Loan, lend
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
    found = lend(sent.items(), "cpu")
    assert [one.name for one in found.tensors if "q_proj" in one.name] == []
    for one in found.tensors:
        [piece] = found.handles[one.memory]
        tensor = sent[one.name].value()
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


def test_what_cannot_be_lent_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan, "exported", lambda whole: whole.numpy().tobytes())
    whole = torch.arange(12.0).view(3, 4)
    given = {"rows": whole[1:], "columns": whole[:, 1:], "steps": torch.arange(3)}
    copy = Loan.from_bytes(lend(given.items(), "cpu").to_bytes())
    assert copy == Loan([Lent("rows", "float32", (2, 4), 0, 16)], [whole.numpy().tobytes()])
    with pytest.raises(WeightSyncError, match="share_base is true, but the trainer holds 'rows' in memory of cpu"):
        lend(given.items())
    with pytest.raises(WeightSyncError, match="no base weight of the trainer lies in one piece"):
        lend([("columns", whole[:, 1:])], "cpu")
