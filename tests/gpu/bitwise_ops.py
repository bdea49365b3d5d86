# SPDX-License-Identifier: Apache-2.0
"""Compare the operations of `numerics: bitwise` bit by bit, as sampler and trainer call them, and time them.

`python -m tests.gpu.bitwise_ops [NAME ...]` prints one line per comparison: the operation, `equal` or the number of
elements that differ and the largest difference. An operation that raises prints its last line, and the next one runs.
"""

import os
import sys
import traceback
from collections.abc import Callable

if "cublas" in sys.argv:  # as vLLM's batch-invariant mode sets them, before CUDA starts
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

import torch

# Inputs and outputs of each linear: Qwen3-0.6B's and 8B's.
SHAPES = {
    "0.6B qkv": (1024, 4096), "0.6B o": (2048, 1024), "0.6B fc1": (1024, 6144), "0.6B fc2": (3072, 1024),
    "8B qkv": (4096, 6144), "8B o": (4096, 4096), "8B fc1": (4096, 24576), "8B fc2": (12288, 4096),
}  # fmt: skip
COUNTS = (1, 2, 3, 5, 8, 13, 16, 17, 32, 48, 64, 65, 100, 128, 200, 256, 300, 500, 512, 1000, 2048, 3000, 4096)
MOST = 8192
GENERATOR = torch.Generator("cuda")


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda", generator=GENERATOR)).bfloat16()


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Return "equal", or how two tensors differ."""
    if torch.equal(ours, theirs):
        return "equal"
    apart = (ours.double() - theirs.double()).abs()
    return f"DIFFER {int((ours != theirs).sum())} of {ours.numel()}, largest {float(apart.max()):.3g}"


def milliseconds(run: Callable[..., object], *given: object, **options: object) -> float:
    """Return the time of one call on the GPU, the median of a few."""
    for _ in range(3):
        run(*given, **options)
    times = []
    for _ in range(7):
        torch.empty(64 * 2**20, dtype=torch.int8, device="cuda").zero_()  # empties the L2 cache
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(*given, **options)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def say(*words: object) -> None:
    print(*words, flush=True)


def _invariant(name: str, product: Callable[..., torch.Tensor], inputs: torch.Tensor, weight: torch.Tensor) -> None:
    """Print the numbers of rows with which a product differs from that of all rows."""
    whole = product(inputs, weight)
    unlike = [count for count in COUNTS if not torch.equal(product(inputs[:count], weight), whole[:count])]
    say(f"{name}: {'invariant' if not unlike else f'DIFFERS for {unlike} rows'}")


def cublas() -> None:
    """Tell whether cuBLAS without split K is invariant, and whether its bits are those of the Triton kernel."""
    from megarl.bitwise.kernels.matmul import WIDE, matmul

    if "cublas" in sys.argv:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.preferred_blas_library("cublaslt")
    for name, (depth, columns) in SHAPES.items():
        inputs, weight = draw(MOST, depth), draw(columns, depth, scale=depth**-0.5)
        _invariant(f"cublas {name}", torch.nn.functional.linear, inputs, weight)
        ours = matmul(inputs, weight, tiles=WIDE)
        say(f"cublas {name} against triton: {compare(torch.nn.functional.linear(inputs, weight), ours)}")


def matmuls() -> None:
    """Compare the tiles with each other, and time them against cuBLAS."""
    from megarl.bitwise.kernels.matmul import NARROW, WIDE, Tiles, matmul

    others = {
        "64x64x64": Tiles(64, 64, 64, 8, 4, 4), "64x128x64": Tiles(64, 128, 64, 8, 4, 4),
        "128x256x64": Tiles(128, 256, 64, 8, 8, 3), "64x32x128": Tiles(64, 32, 128, 8, 4, 4),
        "32x64x128": Tiles(32, 64, 128, 8, 4, 4), "16x64x128": Tiles(16, 64, 128, 8, 4, 4),
        "16x32x256": Tiles(16, 32, 256, 8, 4, 3),
    }  # fmt: skip
    every = {"wide": WIDE, "narrow": NARROW} | others
    for name, (depth, columns) in SHAPES.items():
        inputs, weight = draw(MOST, depth), draw(columns, depth, scale=depth**-0.5)
        whole = matmul(inputs, weight, tiles=WIDE)
        for kind, tiles in every.items():
            try:
                same = compare(matmul(inputs, weight, tiles=tiles), whole)
                few = all(torch.equal(matmul(inputs[:c], weight, tiles=tiles), whole[:c]) for c in COUNTS)
                say(f"matmul {name} {kind}: {same}; few rows {'equal' if few else 'DIFFER'}")
            except Exception as error:
                say(f"matmul {name} {kind}: FAILED {str(error)[:120]}")
        for count in (1, 64, 256, MOST):
            rows = inputs[:count]
            line = [f"cublas {milliseconds(torch.nn.functional.linear, rows, weight):.4f}"]
            for kind in ("wide", "narrow", "64x64x64", "128x256x64", "64x32x128", "16x32x256"):
                try:
                    line.append(f"{kind} {milliseconds(matmul, rows, weight, tiles=every[kind]):.4f}")
                except Exception:
                    line.append(f"{kind} failed")
            say(f"time {name} {count} rows, ms: {', '.join(line)}")
    bias = draw(columns)
    say("matmul with bias, 1 row:", compare(matmul(inputs[5:6], weight, bias), matmul(inputs, weight, bias)[5:6]))
    fine = matmul(inputs, weight, dtype=torch.float32)
    say("matmul to float32, 3 rows:", compare(matmul(inputs[5:8], weight, dtype=torch.float32), fine[5:8]))


def low_rank() -> None:
    """Compare tokens of one adapter with the same among two adapters, shuffled, in fewer rows."""
    from megarl.bitwise.kernels.low_rank import Columns, Tokens, all_tokens, expand, shrink
    from megarl.bitwise.kernels.matmul import WIDE, matmul

    for depth, features, rank in ((1024, 2048, 16), (12288, 4096, 16), (4096, 24576, 64), (1024, 1024, 8)):
        inputs, given = draw(MOST, depth), draw(MOST, features)
        a, b = draw(2, rank, depth, scale=depth**-0.5), draw(2, features, rank)
        low = inputs.new_empty(MOST, rank)
        whole = all_tokens(MOST, inputs.device)
        shrink(inputs, a[1:], whole, low)
        out = torch.empty_like(given)
        expand(low, b[1:], whole, out, given, Columns.of(features))
        name = f"low rank {depth}->{rank}->{features}"
        for count in (1, 7, 64, 333, 4000):
            adapter_of = (torch.arange(count, device="cuda") % 3 - 1).int()
            order = torch.sort(adapter_of, stable=True).indices.int()
            counts = torch.tensor([int((adapter_of == i).sum()) for i in (-1, 0, 1)], dtype=torch.int32, device="cuda")
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
            tokens = Tokens(order, counts, starts, torch.tensor([-1, 0, 1], dtype=torch.int32, device="cuda"), 3)
            few, total = inputs.new_zeros(count, rank), given[:count].clone()
            shrink(inputs[:count], a, tokens, few)
            expand(few, b, tokens, total, total, Columns.of(features))
            mine = adapter_of == 1
            say(f"{name} {count} mixed tokens:", compare(few[mine], low[:count][mine]),
                compare(total[mine], out[:count][mine]))  # fmt: skip
        say(f"{name} shrink against matmul:", compare(matmul(inputs, a[1], tiles=WIDE), low))
        say(f"{name} fused against plain columns:", compare(_fused(low, b[1:], whole, given), out))
        times = (
            milliseconds(shrink, inputs, a[1:], whole, low),
            milliseconds(expand, low, b[1:], whole, out, given, Columns.of(features)),
            milliseconds(torch.nn.functional.linear, inputs, a[1]),
            milliseconds(given.addmm_, low, b[1].t()),
        )
        say(f"time {name} {MOST} rows, ms: shrink, expand; fast: {', '.join(f'{t:.4f}' for t in times)}")


def _fused(low: torch.Tensor, b: torch.Tensor, tokens: object, given: torch.Tensor) -> torch.Tensor:
    """Expand into every other 128 columns of a wider tensor, and return those."""
    from megarl.bitwise.kernels.low_rank import Columns, expand

    wide = given.new_zeros(len(given), given.shape[1] // 128, 2, 128)
    wide[:, :, 1] = given.view(len(given), -1, 128)
    flat = wide.view(len(given), -1)
    expand(low, b, tokens, flat, flat, Columns(128, 256, 128))
    return wide[:, :, 1].reshape(given.shape)


def rows() -> None:
    """Compare norm, rotary embedding and SwiGLU in both layouts, and with few rows; compare with vLLM's own."""
    from megarl.bitwise.kernels import rows as kernels

    groups, queries, width = 8, 2, 128
    fused = draw(MOST, groups, queries + 2, width)
    flat = torch.cat([fused[:, :, :queries].flatten(1), fused[:, :, 2].flatten(1), fused[:, :, 3].flatten(1)], 1)
    weight, angles = draw(width), torch.rand(MOST, width, device="cuda") * 1000
    mine = kernels.Heads(groups * queries, width, queries, (queries + 2) * width, 0)
    theirs = kernels.Heads.of(groups * queries, width)
    packed = fused.flatten(1)
    normed = kernels.rms_norm(packed, weight, 1e-6, mine)
    turned = kernels.rotate(normed, angles, theirs)
    for count in (1, 17, 500):
        few = kernels.rms_norm(flat[:count], weight, 1e-6, theirs)
        say(f"head norm {count} rows:", compare(few, normed[:count]))
        few = kernels.rotate(few, angles[:count, : width // 2], theirs)
        say(f"rotary {count} rows:", compare(few, turned[:count]))
        few = kernels.rotate(flat[:count], angles[:count], theirs)
        say(f"rotary without norm {count} rows:", compare(few, kernels.rotate(packed, angles, mine)[:count]))
    for hidden in (1024, 4096, 576):
        states, weight = draw(MOST, hidden), draw(hidden)
        whole = kernels.rms_norm(states, weight, 1e-6)
        say(f"norm {hidden}:", compare(kernels.rms_norm(states[9:12], weight, 1e-6), whole[9:12]))
        exact = torch.nn.functional.rms_norm(states.double(), (hidden,), weight.double(), 1e-6)
        say(f"norm {hidden} error: {_error(whole, exact):.2e}, torch's "
            f"{_error(torch.nn.functional.rms_norm(states, (hidden,), weight, 1e-6), exact):.2e}")  # fmt: skip
        say(f"time norm {hidden}, ms: {milliseconds(kernels.rms_norm, states, weight, 1e-6):.4f}")
    gates = draw(MOST, 6144)
    say("swiglu:", compare(kernels.swiglu(gates[3:4]), kernels.swiglu(gates)[3:4]))
    say(f"time swiglu, ms: {milliseconds(kernels.swiglu, gates):.4f}; head norm of queries "
        f"{milliseconds(kernels.rms_norm, packed, draw(width), 1e-6, mine):.4f}; rotary "
        f"{milliseconds(kernels.rotate, normed, angles, theirs):.4f}")  # fmt: skip


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def logprobs() -> None:
    """Compare the sums of a row alone with those among others whose rows lie farther apart."""
    from megarl.bitwise.kernels.logprobs import divide_, row_sums

    for columns in (151936, 128256, 49152):
        logits = 3 * torch.randn(64, columns, device="cuda")
        apart = torch.empty(64, columns + 64, device="cuda")[:, :columns].copy_(logits)
        half = torch.full((64,), 0.7, device="cuda")
        say(f"logprobs {columns}:", compare(row_sums(apart[7:8])[:, 0], row_sums(logits)[:, 7]))
        say(f"divide {columns}:", compare(divide_(apart, half), divide_(logits.clone(), half)),
            "torch:", compare(divide_(logits.clone(), half), logits / half[:, None]))  # fmt: skip


OPERATIONS = {f.__name__: f for f in (rows, logprobs, low_rank, matmuls, cublas)}


def main(names: list[str]) -> None:
    from tests.gpu.bitwise_attention import attention, attention_times

    known = OPERATIONS | {"attention": attention, "attention_times": attention_times}
    GENERATOR.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    import triton

    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for name in names or known:
        say(f"-- {name}")
        try:
            known[name]()
        except Exception:
            say(f"{name}: FAILED", " | ".join(traceback.format_exc().splitlines()[-3:])[:400])


if __name__ == "__main__":
    main(sys.argv[1:])
