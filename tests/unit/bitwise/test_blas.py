# SPDX-License-Identifier: Apache-2.0
"""Check the choice between cuBLAS and the Triton kernel, with stand-ins for both: integers, whose sums are exact."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from megarl.bitwise import blas
from megarl.errors import UnsupportedError


class Seen:
    """Stand-ins of cuBLAS and the kernel, which note the rows that they were given.

    Attributes:
        cublas, kernel: rows of each call.
        unlike: row counts with which cuBLAS's last element is one bit off.
        depends: True if the kernel's product depends on its tiles.
        fails: what cuBLAS raises.
    """

    def __init__(self) -> None:
        self.cublas: list[int] = []
        self.kernel: list[int] = []
        self.unlike: set[int] = set()
        self.depends = False
        self.fails: Exception | None = None

    def matmul(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None, tiles: object = None,
    ) -> torch.Tensor:  # fmt: skip
        self.kernel.append(len(inputs))
        out = _product(inputs, weight).to(dtype or inputs.dtype)
        if self.depends and tiles is blas.NARROW:
            out[0, 0] += 1
        return out if bias is None else out + bias

    def cublas_product(self, inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if self.fails is not None:
            raise self.fails
        self.cublas.append(len(inputs))
        out.copy_(_product(inputs, weight))
        if len(inputs) in self.unlike:
            bits = out.view(torch.int16 if out.dtype.itemsize == 2 else torch.int32)
            bits[-1, -1] ^= 1


def _product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a product whose every row is the same whatever the others are."""
    return inputs.double().sum(1, keepdim=True) * weight.double().sum(1)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    stand_in = Seen()
    monkeypatch.setattr(blas, "matmul", stand_in.matmul)
    monkeypatch.setattr(blas, "_cublas", stand_in.cublas_product)
    monkeypatch.setattr(blas, "_without_split_k", _nothing)
    monkeypatch.setattr(blas, "_DECIDED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    # A tensor of the CPU that says it is CUDA's: ``multiply`` asks nothing else.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    return stand_in


def _operands(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows * 16).view(rows, 16).bfloat16() % 5, torch.arange(48).view(3, 16).bfloat16() % 3


def _multiply(rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return blas.multiply(*_operands(rows), dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_cublas_multiplies_where_every_compared_count_has_the_kernels_bits(seen: Seen, dtype: torch.dtype) -> None:
    out = _multiply(7, dtype)
    assert seen.cublas == [*blas.compared_rows(3, 2), 7]
    assert seen.kernel == [blas.MOST_ROWS, 64]
    assert torch.equal(out, _product(*_operands(7)).to(dtype or torch.bfloat16))
    _multiply(300, dtype)  # the shape is decided
    assert seen.cublas[-1] == 300 and seen.kernel == [blas.MOST_ROWS, 64]


@pytest.mark.parametrize("rows", [1, 200, 333, blas.MOST_ROWS])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_one_bit_that_differs_leaves_the_shape_to_the_kernel(seen: Seen, rows: int, dtype: torch.dtype) -> None:
    seen.unlike = {rows}
    _multiply(7, dtype)
    assert seen.kernel == [blas.MOST_ROWS, 64, 7]
    calls = len(seen.cublas)
    _multiply(9, dtype)
    assert seen.kernel[-1] == 9 and len(seen.cublas) == calls, "decided once, for the whole process"


def test_a_zero_of_the_other_sign_is_a_difference(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.equal`` would not see it."""
    given = torch.zeros(4, 16), torch.zeros(3, 16), torch.zeros(4, 3), [1, 4]
    assert blas._equals(*given)
    monkeypatch.setattr(blas, "_cublas", lambda inputs, weight, out: out.zero_().neg_())
    assert not blas._equals(*given)


@pytest.mark.parametrize("failure", [RuntimeError(), NotImplementedError(), TypeError()])
def test_the_kernel_multiplies_where_torch_lacks_the_product(seen: Seen, failure: Exception) -> None:
    seen.fails = failure
    _multiply(7, torch.float32)
    assert seen.kernel[-1] == 7 and not seen.cublas


def test_more_rows_than_were_compared_are_multiplied_in_slices(seen: Seen) -> None:
    rows = 2 * blas.MOST_ROWS + 5
    out = _multiply(rows)
    assert seen.cublas[-3:] == [blas.MOST_ROWS, blas.MOST_ROWS, 5]
    assert torch.equal(out, _product(*_operands(rows)).bfloat16())


def test_a_wide_product_is_compared_with_fewer_rows() -> None:
    counts = blas.compared_rows(151936, 4)
    assert counts[-1] * 151936 * 4 <= blas.MOST_BYTES < 2 * counts[-1] * 151936 * 4
    assert set(range(1, 257)) <= set(counts)
    assert blas.compared_rows(1024, 2)[-1] == blas.MOST_ROWS


def test_shapes_and_dtypes_are_decided_apart(seen: Seen) -> None:
    seen.unlike = {200}
    _multiply(7)
    seen.unlike = set()
    _multiply(7, torch.float32)
    assert sorted(blas._DECIDED.values()) == [0, blas.MOST_ROWS]


def test_a_shape_that_is_met_during_capture_gets_the_kernel_until_it_is_compared(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _multiply(7)
    assert seen.kernel == [7] and not seen.cublas and not blas._DECIDED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _multiply(7)
    assert seen.cublas[-1] == 7


def test_a_bias_and_no_rows_are_the_kernels(seen: Seen) -> None:
    inputs, weight = _operands(7)
    blas.multiply(inputs, weight, torch.ones(3).bfloat16())
    assert seen.kernel == [7] and not seen.cublas
    blas.multiply(inputs[:0], weight)
    assert seen.kernel[-1] == 0


def test_a_kernel_that_depends_on_the_rows_is_refused(seen: Seen) -> None:
    seen.depends = True
    with pytest.raises(UnsupportedError, match=r"'bitwise' on a GPU.*3 x 16 depends on the number of rows.*fast"):
        _multiply(7)
