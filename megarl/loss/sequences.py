# SPDX-License-Identifier: Apache-2.0
"""Sum over the sequences of a micro-batch and back to its tokens, also if context parallelism splits a sequence.

Shape letters: T response tokens of one micro-batch on this rank, sequence after sequence; S sequences of the
micro-batch. Under context parallelism (CP) every rank of the group has the same S sequences and other tokens of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.cuda_memory import upload
from megarl.errors import LossInputError


@dataclass(frozen=True)
class Sequences:
    """The sequence of each token. Tensors are made on first use: a loss that needs none costs nothing.

    Attributes:
        counts_S: int64, response tokens of each sequence on this rank; may be 0.
        lengths_S: int64, the same over all CP ranks.
        groups_S: int64, the prompt group of each sequence (``Sample.group``), or None where samples have none.
        device: where tensors are made.
        group: process group of the CP ranks that share the micro-batch; None if this rank has all its tokens.
    """

    counts_S: np.ndarray
    lengths_S: np.ndarray
    groups_S: np.ndarray | None
    device: torch.device
    group: dist.ProcessGroup | None = None

    @cached_property
    def ids_T(self) -> torch.Tensor:
        """Int64 index of each token's sequence, 0 to S - 1."""
        return self._tensor(np.repeat(np.arange(len(self.counts_S)), self.counts_S))

    @cached_property
    def group_ids_T(self) -> torch.Tensor:
        """Int64 group of each token's sequence.

        Raises:
            LossInputError: the samples have no groups.
        """
        if self.groups_S is None:
            raise LossInputError("group_ids_T: the samples have no groups; give every Sample its group")
        return self._tensor(np.repeat(self.groups_S, self.counts_S))

    @cached_property
    def counts(self) -> torch.Tensor:
        """``counts_S`` as a tensor."""
        return self._tensor(self.counts_S)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """``lengths_S`` as a tensor."""
        return self._tensor(self.lengths_S)

    def local_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Sum this rank's tokens of each sequence, ``[S]``, in an order that does not change between runs."""
        # unsafe: without the check of the counts, which would wait for the device.
        return torch.segment_reduce(values_T, "sum", lengths=self.counts, unsafe=True)

    def all_reduce(self, values_S: torch.Tensor) -> torch.Tensor:
        """Sum over the CP ranks."""
        if self.group is None:
            return values_S
        values_S = values_S.contiguous().clone()
        dist.all_reduce(values_S, group=self.group)
        return values_S

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)), self.device)


class SequenceSum(torch.autograd.Function):
    """``[T]`` -> ``[S]``, over all CP ranks.

    Every CP rank adds its own share to the loss, and the shares depend on the same sum. The gradient of the sum is
    therefore itself summed over the ranks before it goes back to this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        ctx.sequences = sequences
        return sequences.all_reduce(sequences.local_sum(values_T))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """From the gradient ``[S]`` to that of this rank's tokens, ``[T]``."""
        sequences = ctx.sequences
        return sequences.all_reduce(gradients[0])[sequences.ids_T], None


class PerToken(torch.autograd.Function):
    """``[S]`` -> ``[T]``, the value of each token's sequence. ``SequenceSum`` sums the gradient over CP ranks."""

    @staticmethod
    def forward(ctx: Any, values_S: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        ctx.sequences = sequences
        return values_S[sequences.ids_T]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """From the gradient of the tokens, ``[T]``, to ``[S]``."""
        return ctx.sequences.local_sum(gradients[0].contiguous()), None
