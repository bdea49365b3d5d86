# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of the weight path with plain references: digests with ``mix64``, slots with torch.

Run as a program (`python -m tests.helpers.weight_kernels`), it uses the CPU and Triton's interpreter.
"""

import torch

from megarl.checkpoint_engine.buckets.splitmix import mix64
from megarl.checkpoint_engine.receiver.writers.host import HostWrites
from megarl.checkpoint_engine.receiver.writers.jobs import Source, Write
from megarl.checkpoint_engine.wire import Place, Places
from megarl.model.weights.sharded_tensor import Update
from megarl.model.weights.sums import Deferred


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
    assert [
        number % 2**64
        for number in flatten(filled, flatten_table(places, [[part] for part in parts], filled.device)).tolist()
    ] == first
    for part, place in zip(parts, places, strict=True):
        assert torch.equal(filled[place.offset : place.offset + place.nbytes], part)
    covered = torch.zeros(len(host), dtype=torch.bool)
    for place in places:
        covered[place.offset : place.offset + place.nbytes] = True
    assert not filled.cpu()[~covered].any()
    apart = [*parts, filled[1:10], filled.view(2, -1).T]
    data = [one.cpu().contiguous().view(-1).numpy().tobytes() for one in apart]
    assert [number % 2**64 for number in tensor_digests(apart).tolist()] == [mix64(one) for one in data]
    assert copies([filled[8:24], filled[:3]]) and not copies([filled[:3], filled[8:24]])
    assert not copies([filled[1:9]]) and not copies([filled.view(2, -1).T])
    for change in ((30_001, 30_001), (30_000, 30_002)):
        other = host.clone()
        other[change[0]], other[change[1]] = host[change[1]], host[change[0]] ^ (change[0] == change[1])
        changed = actual(other)
        assert changed == expected(other) and changed[:5] == first[:5] and changed[5] != first[5]


def check_copies(device: str, dtype: torch.dtype) -> None:
    """Runs of a bucket reach their parameters and nothing else; digests are the bucket's; bad values have names.

    A whole tensor, parts of one with gaps, a vector whose bytes are no multiple of 8, and writes that are no copies.
    """
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies

    generator = torch.Generator().manual_seed(4)
    shapes, size = {"whole": (9, 400), "cut": (64, 24), "vector": (1, 37), "rest": (6, 16)}, dtype.itemsize
    places, end = [], 0
    for name, shape in shapes.items():
        nbytes = shape[0] * shape[1] * size
        places.append(Place(name, str(dtype)[6:], shape, 0, end, nbytes))
        end += -(-nbytes // 64) * 64
    payload = torch.zeros(end, dtype=torch.uint8)
    for place in places:
        view = payload[place.offset : place.offset + place.nbytes].view(dtype)
        view.copy_(torch.randn(view.shape, generator=generator))
    # Tensor, its first row and rows, columns, scaling.
    cases = {
        "whole": [(0, 9, 400, 1.0)],
        "cut": [(8, 16, 24, 1.0), (40, 8, 24, 1.0)],
        "vector": [(0, 1, 37, 1.0)],
        "rest": [(0, 6, 8, 1.0), (2, 2, 16, 0.5)],
    }
    held = torch.full((32, 1024), 7.0, dtype=dtype, device=device)
    writes, row = [], 0
    for place, parts in zip(places, cases.values(), strict=True):
        writes.append([])
        for first, rows, columns, scaling in parts:
            width = place.shape[1]
            source = Source(0, dtype, place.offset // size + first * width, (rows, columns), (width, 1))
            target = held[row : row + 4].view(-1)[: rows * columns].view(rows, columns)
            writes[-1].append(Write(place.name, target, source, scaling))
            row += 4
    copied = Copies(Places(places), writes)
    assert copied.others == writes[3]
    digests, found = copied.run(payload.to(device))
    assert found() == ([], [])
    assert digests() == b"".join(
        mix64(payload[p.offset : p.offset + p.nbytes].numpy().tobytes()).to_bytes(8, "little") for p in places
    )
    for group in writes[:3]:
        for write in group:
            begin = write.source.offset * size
            assert torch.equal(write.target.cpu().view(-1), payload[begin:][: write.target.nbytes].view(dtype))
            # Only the target's part of its four rows is written.
            write.target.fill_(7.0)
    assert (held == 7.0).all()
    for value in (float("inf"), float("-inf"), float("nan")):
        for number, at in ((0, 3599), (1, 8 * 24), (2, 36), (2, 0)):
            bad = payload.clone()
            bad[places[number].offset :].view(dtype)[at] = value
            assert copied.run(bad.to(device)).found() == ([places[number].name], [])
    # What is not copied may be anything.
    bad = payload.clone()
    bad[places[1].offset :].view(dtype)[0] = float("inf")
    assert copied.run(bad.to(device)).found() == ([], [])
    check_held(places, writes, payload.to(device), held)
    moved = copied._back.sources.clone()
    moved[0] += 8
    copied._back = copied._back._replace(sources=moved)
    assert copied.run(payload.to(device)).found() == ([], ["whole"])


def check_held(places: list[Place], writes: list[list[Write]], payload: torch.Tensor, held: torch.Tensor) -> None:
    """Compare what must be there already, and write nothing: bytes of a tensor, and columns of one.

    Args:
        places, writes, payload: of ``check_copies``; the last tensor's writes are no copies, but its first columns.
        held: the memory of all parameters.
    """
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies
    from megarl.checkpoint_engine.receiver.writers.gpu import GpuWrites

    there = [[write._replace(held=True) for write in group] for group in writes]
    compared = Copies(Places(places[:3]), there[:3])
    held.fill_(7.0)
    assert compared.run(payload).found() == ([], ["whole", "cut", "cut", "vector"]) and (held == 7.0).all()
    Copies(Places(places[:3]), writes[:3]).run(payload)
    before = held.clone()
    assert compared.run(payload).found() == ([], []) and torch.equal(held, before)
    writes[0][0].target[8, 399] += 1.0
    assert compared.run(payload).found() == ([], ["whole"])
    others = Copies(Places(places[3:]), there[3:]).others
    assert others == there[3]
    cut = GpuWrites(others)
    held.fill_(7.0)
    assert cut.run(payload)() == ([], ["rest", "rest"]) and (held == 7.0).all()
    assert GpuWrites(writes[3]).run(payload)() == ([], [])
    before = held.clone()
    assert cut.run(payload)() == ([], []) and torch.equal(held, before)
    writes[3][0].target[5, 7] += 1.0
    assert cut.run(payload)() == ([], ["rest"])
    bad, before = payload.clone(), held.clone()
    bad[places[3].offset :].view(held.dtype)[3] = float("nan")
    assert cut.run(bad)()[0] == ["rest"] and torch.equal(held, before)


def check_slots(device: str, dtype: torch.dtype, exact: bool) -> None:
    """A slot holds what ``HostWrites`` writes: cut, transposed, scaled, padded, or zeros; bad values have names."""
    generator = torch.Generator().manual_seed(1)
    from megarl.checkpoint_engine.receiver.writers.gpu import GpuWrites

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
    # In the same memory again and again, where a GPU replays its kernels.
    held = payload.to(device)
    for _ in range(4):
        payload[:40_000].view(dtype).copy_(torch.randn(40_000 // dtype.itemsize, generator=generator))
        held.copy_(payload)
        filler.capture()
        assert HostWrites(writes).run(payload)() == filler.run(held)() == ([], [])
        for mine, other in zip(buffers, theirs, strict=True):
            torch.testing.assert_close(mine, other.cpu())
    held.view(dtype)[1024 + 2900] = float("nan")
    assert filler.run(held)() == (["job6"], [])


def check_merge(device: str, dtype: torch.dtype) -> None:
    """A merged weight is the float64 sum, rounded once but for values between two that are equally near."""
    from megarl.model.weights.sum_kernel import add

    generator = torch.Generator().manual_seed(2)
    for rows, columns, rank in ((70, 130, 3), (64, 128, 16), (33, 200, 70)):
        base = torch.randn(rows, columns + 5, generator=generator).to(dtype)[:, :columns]
        a = torch.randn(rank, columns, generator=generator) * 0.1
        b = torch.randn(rank, rows, generator=generator).T * 0.1
        merged = add(base.to(device), Update(a.to(device), b.to(device), 0.7)).cpu()
        exact = base.double() + 0.7 * (b.double() @ a.double())
        assert merged.is_contiguous() and merged.dtype == dtype and (merged != base).any()
        # Half the distance of neighbours, and float32's own error.
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
        assert ((merged.double() - exact).abs() <= bound).all(), (rows, columns, rank)


def check_deferred(device: str, dtype: torch.dtype) -> None:
    """Deferred tensors in a bucket, with and without an update, are what they are one by one; nothing else is written.

    Rows of a fused weight's part, a range of rows, vectors, unaligned rows, and a rank above a dot's inner dimension.
    """
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    grouped, plain, odd = random(3, 5, 24, 136), random(70, 136), random(33, 51)
    low = torch.float32 if dtype == torch.float32 else torch.bfloat16
    updates = [Update(random(r, n, kind=low), random(m, r, kind=low), 0.3) for r, m, n in ((8, 216, 136), (70, 33, 51))]
    tensors = [
        Deferred(grouped[:, :3].flatten(1, 2), (216, 136), updates[0]),
        Deferred(grouped[:, 3], (72, 136)),
        Deferred(grouped[:, 3], (72, 136))[20:50],
        Deferred(grouped[:, :3].flatten(1, 2), (216, 136), updates[0])[50:123],
        Deferred(plain[None], (65, 136)),
        Deferred(odd[None], (33, 51), updates[1]),
        Deferred(random(1, 40, 1), (40,)),
        Deferred(random(3, 12, 2)[..., :1], (36,)),
    ]
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // 64) * 64
    payload = torch.full((end,), 7, dtype=torch.uint8, device=device)
    Deferred.writer(tensors, offsets)(payload)
    for tensor in tensors:
        runs = tensor.runs()
        assert (runs is None) == (
            tensor.update is not None or (len(tensor.shape) == 1 and not tensor.view.is_contiguous())
        )
        if runs is not None:
            assert torch.equal(torch.cat([run.flatten() for run in runs]), tensor.value().flatten())
            assert {run.untyped_storage().data_ptr() for run in runs} == {tensor.view.untyped_storage().data_ptr()}
    for number, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        found = payload[offset : offset + tensor.nbytes].view(dtype).view(tensor.shape)
        expected = tensor.value()
        if tensor.update is None:
            assert torch.equal(found, expected), number
        # Two sums that differ in float32's last bits may be rounded to neighbours.
        torch.testing.assert_close(found.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=2e-5)
        assert (payload[offset + tensor.nbytes : min([o for o in offsets if o > offset], default=end)] == 7).all()


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
    check_deferred("cpu", torch.float32)
    for dtype, exact in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
        check_slots("cpu", dtype, exact)
        check_copies("cpu", dtype)


if __name__ == "__main__":
    main()
