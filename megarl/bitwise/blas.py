# SPDX-License-Identifier: Apache-2.0
"""Multiply rows by a weight: by cuBLAS where it gives the bits of the Triton kernel, by that kernel elsewhere.

Both give the same bits where cuBLAS is used, so trainer and sampler may choose differently. cuBLAS sums an element in
the order of K if it may not split K. It chooses its kernel by the number of rows, so it is compared with the Triton
kernel for many numbers of rows, once for each shape and process, at the first product. More rows than were compared
are multiplied in slices.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarl.bitwise.kernels.matmul import NARROW, WIDE, matmul
from megarl.errors import UnsupportedError

MOST_ROWS = 4096  # that are compared, and that cuBLAS gets at once
MOST_BYTES = 2**28  # of a product that is compared
SEED = 1234
_DECIDED: dict[tuple, int] = {}  # rows that cuBLAS may multiply, by shape and dtypes


def multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``, ``[T, N]``, with the bits of ``kernels.matmul.matmul``.

    Args:
        inputs: ``[T, K]``.
        weight: ``[N, K]``, of the same dtype.
        bias: ``[N]`` or None. A product with a bias is the Triton kernel's.
        dtype: of the result; default: of the inputs.
    """
    out_dtype = dtype or inputs.dtype
    plain = inputs.is_cuda and bias is None and inputs.stride(-1) == weight.stride(-1) == 1
    rows = _rows_of_cublas(weight, out_dtype) if plain else 0
    if not rows or not len(inputs):
        return matmul(inputs, weight, bias, dtype)
    out = inputs.new_empty(len(inputs), len(weight), dtype=out_dtype)
    with _without_split_k():
        for part, place in zip(inputs.split(rows), out.split(rows), strict=True):
            _cublas(part, weight, place)
    return out


def compared_rows(columns: int, size: int) -> list[int]:
    """Return the numbers of rows with which cuBLAS is compared.

    Args:
        columns: N.
        size: bytes of an element of the product.
    """
    counts = {*range(1, 257), *range(256, MOST_ROWS + 1, 128), *range(317, MOST_ROWS, 61), 333}
    most = min(MOST_ROWS, MOST_BYTES // (columns * size))
    return sorted(count for count in counts if count <= most)


def _rows_of_cublas(weight: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many rows cuBLAS may multiply at once; 0 for none.

    A shape that is met first while a CUDA graph is captured cannot be compared then. It gets the Triton kernel.
    """
    key = (*weight.shape, weight.stride(0), weight.dtype, dtype, weight.device)
    if key not in _DECIDED:
        if torch.cuda.is_current_stream_capturing():
            return 0
        _DECIDED[key] = _compare(*key)
    return _DECIDED[key]


@torch.no_grad()
def _compare(
    columns: int, depth: int, stride: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> int:
    """Return the largest number of compared rows, or 0 if cuBLAS differs from the Triton kernel in any of them.

    Raises:
        UnsupportedError: the Triton kernel itself depends on the number of rows.
    """
    counts = compared_rows(columns, out_dtype.itemsize)
    draw = torch.Generator(device).manual_seed(SEED)
    inputs = torch.randn(counts[-1], depth, dtype=dtype, device=device, generator=draw)
    weight = torch.randn(columns, stride, dtype=dtype, device=device, generator=draw)[:, :depth]
    whole = matmul(inputs, weight, dtype=out_dtype, tiles=WIDE)
    few = matmul(inputs[:64], weight, dtype=out_dtype, tiles=NARROW)
    if not torch.equal(few, whole[: len(few)]):
        raise UnsupportedError(
            f"model.numerics is 'bitwise' on {torch.cuda.get_device_name(device)}, whose product of {dtype} with a "
            f"weight of {columns} x {depth} depends on the number of rows; supported are GPUs on which tests/gpu/"
            "bitwise_ops.py finds it equal (H200); use model.numerics=fast"
        )
    return counts[-1] if _equals(inputs, weight, whole, counts) else 0


def _equals(inputs: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor, counts: list[int]) -> bool:
    """Tell whether cuBLAS's product has the bits of ``whole`` for each number of rows."""
    bits = torch.int16 if whole.dtype.itemsize == 2 else torch.int32
    unlike = torch.zeros((), dtype=torch.bool, device=whole.device)
    out = torch.empty_like(whole)
    try:
        with _without_split_k():
            for count in counts:
                _cublas(inputs[:count], weight, out[:count])
                unlike |= (out[:count].view(bits) != whole[:count].view(bits)).any()
    except (RuntimeError, TypeError):  # this torch or GPU has no such product
        return False
    return not unlike.item()


def _cublas(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == inputs.dtype:
        torch.mm(inputs, weight.t(), out=out)
    else:
        torch.mm(inputs, weight.t(), out_dtype=out.dtype, out=out)


@contextmanager
def _without_split_k() -> Iterator[None]:
    """Let cuBLAS add in float32 in one piece. The backward pass may split K: nothing is compared with it."""
    allowed = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    library = torch._C._get_blas_preferred_backend()
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(False, False)
    torch._C._set_blas_preferred_backend(torch._C._BlasBackend.Cublaslt)
    try:
        yield
    finally:
        torch._C._set_blas_preferred_backend(library)
        torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*allowed)
