# SPDX-License-Identifier: Apache-2.0
"""Exchange tokens between the GPUs of a host by their copy engines, beside the products that need them.

Every rank offers what the others read, and works on one rank's tokens while those of the next are copied (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023; PyTorch's asynchronous tensor
parallelism). NCCL's kernels would take multiprocessors from the products, and win nothing. The memory comes by CUDA
IPC.

Shapes are those of ``token_exchange``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from megarl.cuda_memory import WORD, exported, opened
from megarl.errors import UnsupportedError
from megarl.network import boot_id
from megarl.parallel.token_exchange import Fill, Use
from megarl.triton_support import has_triton

# Bytes in front of a rank's memory, for the flags by which streams meet; streams that meet, and how long they wait.
FLAGS, MAIN, COPIES, MEET_SECONDS = 4096, 0, 1, 900.0


class PeerMemory:
    """Memory of every rank of a group, which the GPUs of all its ranks read. Collective to make.

    Raises:
        RuntimeError: a rank cannot offer its memory, or this one cannot read it.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._rank = group.rank()
        own = torch.zeros(FLAGS + nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        handles: list[bytes] = [b""] * group.size()
        dist.all_gather_object(handles, _offered(own), group=group)
        if not all(handles):
            raise RuntimeError("a rank's GPU memory cannot be shared by CUDA IPC")
        self._memory = [own if rank == self._rank else opened(handle) for rank, handle in enumerate(handles)]
        self._flags = torch.tensor([memory.data_ptr() for memory in self._memory], device="cuda")
        self.nbytes = nbytes

    def views(self, rank: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like the given ones that lie one after the other in a rank's memory."""
        found, first = [], FLAGS
        for one in like:
            found.append(self._memory[rank][first : first + one.nbytes].view(one.dtype).view(one.shape))
            first += one.nbytes
        return found

    def meet(self, channel: int) -> None:
        """Hold the current stream until every rank's has come here."""
        from megarl.parallel.meet_kernel import meet

        meet(self._flags, self._rank, channel, MEET_SECONDS)


class Peers:
    """See ``token_exchange.Exchange``. A rank's memory has the bytes of its part of a tensor, once for each peer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks, self._rank = group, group.size(), group.rank()
        # All of it is kept: a CUDA graph may have been captured with an earlier, smaller one.
        self._memories: list[PeerMemory] = []
        # Products alternate between two streams, so that the small ones of two ranks' tokens fill the GPU.
        self._copies, self._side = torch.cuda.Stream(priority=-1), torch.cuda.Stream()

    def gather(self, wide: torch.Tensor, narrow: torch.Tensor, use: Use) -> torch.Tensor:
        """See ``Exchange``."""
        mine, tokens = [wide.contiguous(), narrow.contiguous()], len(wide)
        every = [local.new_empty(self._ranks * tokens, local.shape[1]) for local in mine]
        memory = self._memory(sum(local.nbytes for local in mine))
        memory.meet(MAIN)  # nobody reads any more what was there
        torch._foreach_copy_(
            [*memory.views(self._rank, mine), every[1][self._places(self._rank, tokens)]], [*mine, mine[1]]
        )
        memory.meet(MAIN)
        with self._streams():
            use(self._places(self._rank, tokens), *mine)
            for step in range(1, self._ranks):
                peer = (self._rank + step) % self._ranks
                places = self._places(peer, tokens)
                parts = [whole[places] for whole in every]
                with torch.cuda.stream(self._copies):
                    for part, theirs in zip(parts, memory.views(peer, mine), strict=True):
                        part.copy_(theirs, non_blocking=True)
                    arrived = self._copies.record_event()
                with self._product(step):
                    torch.cuda.current_stream().wait_event(arrived)
                    use(places, *parts)
        return every[1]

    def scatter(self, fill: Fill, like: torch.Tensor, tokens: int, features: int) -> torch.Tensor:
        """See ``Exchange``."""
        partial = like.new_empty(self._ranks, tokens, features)
        offered = list(partial[1:])  # for each step what another rank reads
        memory = self._memory(sum(part.nbytes for part in offered))
        memory.meet(MAIN)  # nobody reads any more what was there
        with self._streams():
            for step in range(1, self._ranks):
                peer, source = (self._rank + step) % self._ranks, (self._rank - step) % self._ranks
                with self._product(step):
                    fill(self._places(peer, tokens), memory.views(self._rank, offered)[step - 1])
                    filled = torch.cuda.current_stream().record_event()
                with torch.cuda.stream(self._copies):
                    self._copies.wait_event(filled)
                    memory.meet(COPIES)  # every rank has filled what this step reads
                    partial[source].copy_(memory.views(source, offered)[step - 1], non_blocking=True)
            fill(self._places(self._rank, tokens), partial[self._rank])
        return partial.sum(dim=0)

    def _memory(self, nbytes: int) -> PeerMemory:
        """Return memory of at least so many bytes; all ranks ask for as many."""
        if not self._memories or self._memories[-1].nbytes < nbytes:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"a CUDA graph needs {nbytes} bytes that tensor-parallel ranks share, more than passes before it "
                    "did; use train.cuda_graphs=false"
                )
            # In powers of two, so that all of them together are at most twice the last.
            self._memories.append(PeerMemory(self._group, 1 << (nbytes - 1).bit_length()))
        return self._memories[-1]

    @contextmanager
    def _streams(self) -> Iterator[None]:
        """Let the other streams begin after the current one's work, and the current one go on after theirs."""
        current = torch.cuda.current_stream()
        for stream in (self._copies, self._side):
            stream.wait_stream(current)
        yield
        for stream in (self._copies, self._side):
            current.wait_stream(stream)

    def _product(self, step: int) -> torch.cuda.StreamContext:
        """Return a context with the stream of a step's product."""
        return torch.cuda.stream(self._side if step % 2 else torch.cuda.current_stream())

    @staticmethod
    def _places(rank: int, tokens: int) -> slice:
        return slice(rank * tokens, (rank + 1) * tokens)


def can_read(group: dist.ProcessGroup) -> bool:
    """Return True if every rank's GPU reads the others' memory; the same on all ranks. Collective."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, boot_id() if has_triton() else "", group=group)
    if len(set(hosts)) > 1 or not hosts[0]:
        return False
    # Each rank offers a word of its own, to see whether the others read it.
    word, memory = torch.full((1,), WORD + group.rank(), device="cuda"), None
    with suppress(RuntimeError):
        memory = PeerMemory(group, word.nbytes)
        memory.views(group.rank(), [word])[0].copy_(word)
    if not _everywhere(memory is not None, group):
        return False
    assert memory is not None
    found = [memory.views(rank, [word])[0].clone() for rank in range(group.size())]
    return _everywhere([int(each) for each in found] == [WORD + rank for rank in range(group.size())], group)


def _everywhere(holds: bool, group: dist.ProcessGroup) -> bool:
    """Return True if something holds on every rank, once all devices have done what was launched before."""
    answer = torch.tensor([int(holds)], device="cuda")
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
    return bool(answer.item())


def _offered(memory: torch.Tensor) -> bytes:
    try:
        return exported(memory)
    except RuntimeError:
        return b""
