# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of the weight path with plain references: digests with ``mix64``, slots with torch.

Run as a program (`python -m tests.helpers.weight_kernels`), it uses the CPU and Triton's interpreter.
"""

import torch

from megarl.checkpoint_engine.receiver.host_writer import HostWrites
from megarl.checkpoint_engine.receiver.write_jobs import Source, Write
from megarl.checkpoint_engine.splitmix import mix64
from megarl.checkpoint_engine.wire import Place, Places


def check_digests(device: str) -> None:
    """Every range's digest is that of its bytes, at any offset and length; a flipped bit or two swapped words show."""
    from megarl.checkpoint_engine.kernels.ranges import copies, flatten, flatten_table, range_digests, tensor_digests

    generator = torch.Generator().manual_seed(0)
    host = torch.randint(0, 256, (70_000,), dtype=torch.uint8, generator=generator)
    sizes = [6, 0, 2, 8192, 8194, 40_000]
    starts = [0, 64, 64, 128, 8384, 20_000]
    places = Places(
        Place(f"t{i}", "bfloat16", (n // 2,), 0, at, n) for i, (at, n) in enumerate(zip(starts, sizes, strict=True))
    )

    def expected(payload: torch.Tensor) -> list[int]:
        return [mix64(payload[p.offset : p.offset + p.nbytes].numpy().tobytes()) for p in places]

    def actual(payload: torch.Tensor) -> list[int]:
        return [number % 2**64 for number in range_digests(payload.to(device), places).tolist()]

    first = actual(host)
    assert first == expected(host) and first[1] == 0
    parts = [host[p.offset : p.offset + p.nbytes].clone().to(device) for p in places]
    filled = torch.zeros_like(host, device=device)
    assert [number % 2**64 for number in flatten(filled, flatten_table(places, parts, filled.device)).tolist()] == first
    for part, place in zip(parts, places, strict=True):
        assert torch.equal(filled[place.offset : place.offset + place.nbytes], part)
    covered = torch.zeros(len(host), dtype=torch.bool)
    for place in places:
        covered[place.offset : place.offset + place.nbytes] = True
    assert not filled.cpu()[~covered].any()
    apart = [*parts, filled[1:10], filled.view(2, -1).T]
    data = [one.cpu().contiguous().view(-1).numpy().tobytes() for one in apart]
    assert [number % 2**64 for number in tensor_digests(apart).tolist()] == [mix64(one) for one in data]
    assert copies(parts) and not copies([filled[1:9]]) and not copies([filled.view(2, -1).T])
    for change in ((30_001, 30_001), (30_000, 30_002)):
        other = host.clone()
        other[change[0]], other[change[1]] = host[change[1]], host[change[0]] ^ (change[0] == change[1])
        changed = actual(other)
        assert changed == expected(other) and changed[:5] == first[:5] and changed[5] != first[5]


def check_slots(device: str, dtype: torch.dtype, exact: bool) -> None:
    """A slot holds what ``HostWrites`` writes: cut, transposed, scaled, padded, or zeros; bad values have names."""
    generator = torch.Generator().manual_seed(1)
    from megarl.checkpoint_engine.receiver.gpu_writer import GpuWrites

    payload = torch.zeros(1 << 16, dtype=torch.uint8)
    payload[:40_000].view(dtype).copy_(torch.randn(40_000 // dtype.itemsize, generator=generator))
    # (offset, shape, strides, scaling) in elements; shape of the buffer, and how much wider its rows are.
    cases = [
        ((0, (3, 5), (5, 1), 1.0), (8, 16), 3),
        ((640, (64, 30), (30, 1), 2.0), (64, 30), 3),
        ((4096, (7, 33), (66, 2), 0.5), (16, 40), 3),
        ((2048, (40, 8), (1, 40), 4.0), (40, 8), 3),
        (None, (24, 100), 3),
        # Flat: whole, with zeros below, and zeros only.
        ((2048, (40, 8), (8, 1), 0.3), (40, 8), 0),
        ((1024, (3, 1000), (1000, 1), 1.0), (8, 1000), 0),
        (None, (24, 100), 0),
    ]
    writes = []
    for number, (given, shape, gap) in enumerate(cases):
        source = None if given is None else Source(0, dtype, *given[:3])
        # Buffers are slices of larger tensors, as vLLM's are.
        buffer = torch.full((2, shape[0], shape[1] + gap), 7.0, dtype=dtype)[1, :, : shape[1]]
        writes.append(Write(f"job{number}", buffer, source, 1.0 if given is None else given[3]))
    buffers = [one.target for one in writes]
    theirs = [like(buffer, device) for buffer in buffers]
    assert HostWrites(writes).run(payload)() == ([], [])
    filler = GpuWrites([one._replace(target=other) for one, other in zip(writes, theirs, strict=True)])
    assert filler.run(payload.to(device))() == ([], [])
    for mine, other in zip(buffers, theirs, strict=True):
        if exact:
            assert torch.equal(mine, other.cpu())
        torch.testing.assert_close(mine, other.cpu())
    for place, name in ((640 + 31, "job1"), (1024 + 2900, "job6")):
        bad = payload.clone()
        bad.view(dtype)[place] = float("inf")
        found = filler.run(bad.to(device))()
        assert found == ([name], []), found


def check_merge(device: str, dtype: torch.dtype) -> None:
    """A merged weight is the float64 sum, rounded once but for values between two that are equally near."""
    from megarl.lora.kernels.merge import merge

    generator = torch.Generator().manual_seed(2)
    for rows, columns, rank in ((70, 130, 3), (64, 128, 16), (33, 200, 70)):
        base = torch.randn(rows, columns + 5, generator=generator).to(dtype)[:, :columns]
        a = torch.randn(rank, columns, generator=generator) * 0.1
        b = torch.randn(rank, rows, generator=generator).T * 0.1
        merged = merge(base.to(device), a.to(device), b.to(device), 0.7).cpu()
        exact = base.double() + 0.7 * (b.double() @ a.double())
        assert merged.is_contiguous() and merged.dtype == dtype and (merged != base).any()
        # Half the distance of neighbours, and float32's own error.
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
        assert ((merged.double() - exact).abs() <= bound).all(), (rows, columns, rank)


def like(buffer: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor with the same values and strides, inside a larger one."""
    whole = torch.zeros(2, buffer.shape[0], buffer.stride(0), dtype=buffer.dtype, device=device)
    part = whole[1, :, : buffer.shape[1]]
    part.copy_(buffer)
    return part


def main() -> None:
    """Check all with the interpreter, which does not round bfloat16 as GPUs do."""
    check_digests("cpu")
    check_merge("cpu", torch.float32)
    check_merge("cpu", torch.float16)
    for dtype, exact in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
        check_slots("cpu", dtype, exact)


if __name__ == "__main__":
    main()
