# SPDX-License-Identifier: Apache-2.0
"""Take a linear that the model's files fuse under vLLM's own name for it (glm4's ``gate_up_proj``).

vLLM names the parts of a fused linear as most models' files do (``gate_proj``, ``up_proj``). Some files hold one tensor
of all parts instead; an adapter of it has one A for all parts, and a B whose rows are the parts'.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

# Linears whose parts lie one after the other, in vLLM's order, in every model of transformers that fuses them. Under
# other names some models mix them (head by head), and rows cut at the parts' sizes would be the wrong ones.
IN_ORDER = ("qkv_proj", "gate_up_proj")
Shapes = dict[str, tuple[int, int]]


def fused_name(module: str, parts: list[str]) -> str | None:
    """Return the Hugging Face name of all parts together; None if the linear is not fused, or not known to be in order.

    Args:
        module: vLLM's name of the linear.
        parts: Hugging Face names of its parts.
    """
    parent, dot, _ = parts[0].rpartition(".")
    last = module.rpartition(".")[2]
    return f"{parent}{dot}{last}" if len(parts) > 1 and last in IN_ORDER else None


def fused_parts(inner: Any, held: Iterable[str]) -> dict[str, list[str]]:
    """Map the fused linears among ``held`` to their parts.

    Args:
        inner: vLLM's LoRA model manager.
        held: Hugging Face names of adapted modules.
    """
    names = set(held)
    found = {fused_name(module, parts): parts for module, parts in inner.packed_modules.items() if parts}
    return {name: parts for name, parts in found.items() if name in names}


def fuse_shapes(shapes: Shapes, fused: Mapping[str, list[str]]) -> Shapes:
    """Return shapes (input size, output size) with each fused linear in place of its parts."""
    taken = {part for parts in fused.values() for part in parts}
    whole = {name: (shapes[parts[0]][0], sum(shapes[part][1] for part in parts)) for name, parts in fused.items()}
    return {name: shape for name, shape in shapes.items() if name not in taken} | whole


def cut_rows(matrix: torch.Tensor, sizes: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yield the parts of ``[out, r]``: views of as many rows as each part has outputs."""
    begin = 0
    for size in sizes:
        yield matrix[begin : begin + size]
        begin += size
