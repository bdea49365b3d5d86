# SPDX-License-Identifier: Apache-2.0
"""Test which parts of a trainer's weights a worker reads where they are; real engines do so in ``test_direct``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoint_engine.choice import Memory, own_memory
from megarl.checkpoint_engine.loan import Lent, Loan
from megarl.checkpoint_engine.receiver.weights import borrowed
from megarl.checkpoint_engine.receiver.weights.regions import Region
from megarl.errors import WeightSyncError

# A weight [8, 6]; the trainer has its last three columns, or its last four rows, 100 bytes into its memory.
COLUMNS = Lent("weight", "float32", (8, 6), 7, 100, (0, 3), (8, 3))
ROWS = Lent("weight", "float32", (8, 6), 7, 100, (4, 0), (4, 6))


def region(rows: slice, columns: slice, within: tuple[int, int] = (0, 0)) -> Region:
    """Return the region of a part of the weight, which fills a parameter from ``within[0]`` rows of padding on."""
    source = torch.empty(8, 6, device="meta")[rows, columns]
    before, width = within
    whole = torch.empty(source.shape[0] + before, width or source.shape[1], device="meta")
    return Region(whole[before:, : source.shape[1]], source.storage_offset(), source.stride())


@pytest.mark.parametrize(
    ("lent", "wanted", "first"),
    [
        (COLUMNS, region(slice(None), slice(3, 6)), 100),
        (COLUMNS, region(slice(2, 8), slice(3, 6)), 100 + 2 * 3 * 4),
        (COLUMNS, region(slice(2, 8), slice(3, 6), (1, 3)), 100 + (2 * 3 - 3) * 4),  # if its padding were there too
        (COLUMNS, region(slice(5, 6), slice(4, 6)), 100 + (5 * 3 + 1) * 4),  # one row
        (COLUMNS, region(slice(None), slice(0, 3)), None),  # the other rank's
        (COLUMNS, region(slice(None), slice(2, 6)), None),
        (COLUMNS, region(slice(None), slice(4, 6)), None),  # not in one piece
        (ROWS, region(slice(4, 8), slice(None)), 100),
        (ROWS, region(slice(5, 7), slice(None)), 100 + 6 * 4),
        (ROWS, region(slice(3, 8), slice(None)), None),
        (ROWS, region(slice(0, 4), slice(None)), None),
        (ROWS, region(slice(4, 8), slice(None), (0, 9)), None),  # the parameter has it in pieces
    ],
)
def test_a_part_is_found_in_the_trainers_memory_if_it_is_there_as_vllm_reads_it(
    lent: Lent, wanted: Region, first: int | None
) -> None:
    begin, length, *source = borrowed._part(lent, wanted)
    if first is None:
        assert (begin, length, *source) == (0, 0, -1, 0)
    else:
        assert source == [7, first] and length == wanted.target.nbytes
        assert begin == wanted.target.storage_offset() * 4


def test_another_dtype_is_not_read_there() -> None:
    wanted = region(slice(4, 8), slice(None))
    assert borrowed._part(ROWS, wanted._replace(target=wanted.target.bfloat16()))[1] == 0


def test_the_loan_of_a_rank_on_another_gpu_is_refused() -> None:
    loan = Loan([ROWS], [], Memory(own_memory().host, "another GPU"))
    with pytest.raises(
        WeightSyncError, match=r"the loan is that of a rank on Memory.*another GPU.*the rank on its GPU"
    ):
        borrowed.borrow(torch.nn.Linear(1, 1), loan, None, torch.device("cpu"))


def test_an_engine_needs_a_loan_for_each_of_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loan"
    file.write_bytes(Loan([ROWS], [], own_memory()).to_bytes())
    monkeypatch.setattr(borrowed, "get_tensor_model_parallel_world_size", lambda: 2)
    loader: Any = borrowed.BorrowingLoader.__new__(borrowed.BorrowingLoader)
    loader.load_config = SimpleNamespace(model_loader_extra_config={"loan": str(file)})
    with pytest.raises(WeightSyncError, match=r"the engine has 2 GPUs, but it got the loans of 1 trainer ranks"):
        loader.load_weights(torch.nn.Linear(1, 1), None)
