# SPDX-License-Identifier: Apache-2.0
"""Hold one of mcore's optimizers' tensors one after the other in memory, so that a launch updates all of them.

The adapter of a mixture has tens of thousands of matrices. Matrix by matrix, an update takes the host hundreds of
milliseconds and the GPU a few. mcore's DDP already keeps the gradients one after the other; here weights, main weights
and moments get the same order. Every parameter stays the object that it was, and becomes a view.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.model.optimizer.fused_adamw import clip_and_step
from megarl.parallel.mcore import gradients_for_norm
from megarl.parallel.stacks import Groups, has_hook, place

# A parameter and its main weight; in float32 they are one.
Pair = tuple[torch.nn.Parameter, torch.Tensor]
# Matrices that shall lie one after the other.
Matrices = list[torch.nn.Parameter]
# Bytes that the address of each parameter is a multiple of; kernels read vectors of this size.
ALIGNED = 16


class FlatPart:
    """One of mcore's optimizers, whose tensors lie in a few runs.

    Attributes:
        mcores: mcore's optimizer. Its AdamW updates the runs.
        counted: main weights whose gradients this rank counts in the norm, in the order of ``norms``.
    """

    def __init__(
        self, mcores: Any, groups: Sequence[list[list[Pair]]], stacks: Sequence[Groups], joins: Sequence[Matrices]
    ) -> None:
        """Move the tensors.

        Args:
            mcores: one of mcore's optimizers, before its first update.
            groups: of each group of parameters, its runs.
            stacks, joins: see ``flat_part``.
        """
        # Stacks count more than joins: a stack of experts has the joins of each of them in it.
        together = [*joins, *([matrix for matrices in stack for matrix in matrices] for stack in stacks)]
        stack_of = _stack_of_each(together)
        groups = [[_arranged(run, stack_of) for run in runs] for runs in groups]
        self.mcores = mcores
        self._runs: list[Run] = []
        mains = [main for runs in groups for run in runs for _, main in run]
        chosen = _counted(mcores, [pair for runs in groups for run in runs for pair in run])
        for group, runs in zip(mcores.optimizer.param_groups, groups, strict=True):
            made = [Run(run) for run in runs]
            group["params"] = [run.flat for run in made]
            self._runs += made
        for stack in stacks:
            if _adjacent([matrix for matrices in stack for matrix in matrices]):
                place(stack)
        self.counted = [main for main in mains if id(main) in chosen]
        indices = [index for index, main in enumerate(mains) if id(main) in chosen]
        self._counted = torch.tensor(indices, dtype=torch.int64, device=mains[0].device)

    def places(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Map the id of each main weight to the run's tensor and the main weight's first element in it."""
        return {id(main): (run.flat, start) for run in self._runs for main, start in run.starts}

    def norms(self) -> torch.Tensor:
        """Return the norm of the gradient of each of ``counted``, float32."""
        return torch.cat([run.norms() for run in self._runs]).index_select(0, self._counted)

    def prepare(self) -> None:
        """Do nothing: the gradients are where AdamW reads them."""

    def update(self, norm: torch.Tensor, lr: float, max_norm: float) -> None:
        """Clip and update; see ``fused_adamw.clip_and_step``."""
        clip_and_step(self.mcores.optimizer, norm, lr, max_norm)
        for run in self._runs:
            run.round()

    def clear(self) -> None:
        """Do nothing: DDP clears the gradients."""


class Run:
    """Parameters whose gradients lie one after the other. They, and their main weights, become views.

    Attributes:
        flat: all main weights, float32 ``[elements]``. Its ``grad`` is the part of mcore's buffer.
        starts: each main weight and its first element in ``flat``.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """Move the tensors of ``pairs``, in order."""
        models, mains = zip(*pairs, strict=True)
        sizes = [main.numel() for main in mains]
        begins = [0, *accumulate(sizes)]
        self.starts = list(zip(mains, begins[:-1], strict=True))
        self._weights = None if models[0] is mains[0] else _joined(models)
        self.flat = _joined(mains)
        self.flat.grad = models[0].main_grad.as_strided((begins[-1],), (1,))
        # Norms are formed of rows that end where matrices do.
        self._width = math.gcd(*sizes)
        self._rows = torch.tensor([size // self._width for size in sizes], device=self.flat.device)

    def norms(self) -> torch.Tensor:
        """Return the norm of each parameter's gradient, float32 ``[parameters]``."""
        rows = torch.linalg.vector_norm(self.flat.grad.view(-1, self._width), dim=1)
        return torch.segment_reduce(rows.square(), "sum", lengths=self._rows, unsafe=True).sqrt()

    def round(self) -> None:
        """Round the main weights into the model's parameters."""
        if self._weights is not None:
            self._weights.copy_(self.flat)


def flat_part(mcores: Any, stacks: Sequence[Groups] = (), joins: Sequence[Matrices] = ()) -> FlatPart | None:
    """Return an optimizer with its tensors in runs, or None if that cannot be.

    It cannot with mcore's DistributedOptimizer, which lays out its own, and with matrices of so few elements that those
    behind them would lose their alignment.

    Args:
        mcores: one of mcore's optimizers, before its first update.
        stacks: matrices of experts that shall lie one after the other. Those that can, do (``parallel/stacks``).
        joins: matrices of one layer that shall, too (``parallel.stacks.joined``).
    """
    if mcores.optimizer is None or isinstance(mcores, DistributedOptimizer):
        return None
    groups = [list(_runs(pairs)) for pairs in _pairs(mcores)]
    if not any(groups) or any(not aligned(run) for runs in groups for run in runs):
        return None
    mixed = any(mains for mains in getattr(mcores, "fp32_from_fp32_groups", ()))
    return None if mixed else FlatPart(mcores, groups, stacks, joins)


def aligned(pairs: Sequence[Pair]) -> bool:
    """Return True if every parameter keeps its alignment behind the others."""
    return all(model.numel() * model.itemsize % ALIGNED == 0 for model, _ in pairs)


def _pairs(mcores: Any) -> Iterator[list[Pair]]:
    """Yield the pairs of each group of parameters."""
    if hasattr(mcores, "float16_groups"):
        for models, mains in zip(mcores.float16_groups, mcores.fp32_from_float16_groups, strict=True):
            yield list(zip(models, mains, strict=True))
    else:
        for group in mcores.optimizer.param_groups:
            yield [(parameter, parameter) for parameter in group["params"]]


def _runs(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Divide pairs where the next gradient does not begin at the end of the last one."""
    run: list[Pair] = []
    end = None
    for pair in sorted(pairs, key=lambda pair: pair[0].main_grad.data_ptr()):
        gradient = pair[0].main_grad
        start = gradient.data_ptr(), gradient.untyped_storage().data_ptr()
        if run and start != end:
            yield run
            run = []
        run.append(pair)
        end = start[0] + gradient.nbytes, start[1]
    if run:
        yield run


def _stack_of_each(stacks: Sequence[Matrices]) -> dict[int, Matrices]:
    """Map the id of each matrix to all of its stack, in order. Of two stacks with a matrix the later one counts.

    Stacks that mcore reduces early are left out: there a gradient must stay in its bucket.
    """
    found: dict[int, Matrices] = {}
    for matrices in stacks:
        if not any(map(has_hook, matrices)):
            found |= dict.fromkeys(map(id, matrices), matrices)
    return found


def _arranged(run: list[Pair], stack_of: Mapping[int, Matrices]) -> list[Pair]:
    """Change the order of a run's gradients in mcore's buffer, so that the matrices of a stack follow each other.

    mcore sums whole buckets over ranks, so any order will do that all ranks have.

    Args:
        run: the run.
        stack_of: from ``_stack_of_each``; a stack that reaches beyond the run stays as it is.
    """
    pair_of = {id(model): (model, main) for model, main in run}
    order: dict[int, None] = {}
    for model, _ in run:
        if id(model) not in order:
            matrices = stack_of.get(id(model), [model])
            whole = all(id(matrix) in pair_of for matrix in matrices)
            order |= dict.fromkeys(map(id, matrices if whole else [model]))
    arranged = [pair_of[key] for key in order]
    whole = run[0][0].main_grad.as_strided((sum(main.numel() for _, main in run),), (1,))
    for (model, _), part in zip(arranged, whole.split([main.numel() for _, main in arranged]), strict=True):
        model.main_grad = part.view(model.shape)
    return arranged


def _adjacent(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return True if parameters lie one after the other, and so do their gradients."""
    if not all(hasattr(parameter, "main_grad") for parameter in parameters):
        return False
    return all(
        before.data_ptr() + before.nbytes == after.data_ptr()
        and before.main_grad.data_ptr() + before.main_grad.nbytes == after.main_grad.data_ptr()
        for before, after in pairwise(parameters)
    )


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move tensors into one, ``[elements]``, whose views they become."""
    joined = torch.cat([tensor.data.reshape(-1) for tensor in tensors])
    parts = joined.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data = part.view(tensor.shape)
    return joined


def _counted(mcores: Any, pairs: Sequence[Pair]) -> set[int]:
    """Return the ids of the main weights whose gradients mcore counts in the norm on this rank."""
    for model, main in pairs:
        main.grad = model.main_grad
    wanted = {id(gradient) for gradient in gradients_for_norm(mcores)}
    chosen = {id(main) for _, main in pairs if id(main.grad) in wanted}
    for _, main in pairs:
        main.grad = None
    return chosen
