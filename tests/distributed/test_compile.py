# SPDX-License-Identifier: Apache-2.0
"""Compiled layers compute what uncompiled ones do, and after the first update no packing compiles anything again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from megarl.verify.compare import relative_error
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build
from tests.helpers.updates import batch_of, updates

# Samples of each batch: micro-batches of many sizes, from nearly empty to full.
COUNTS = (5, 12, 3, 9)
DROPOUT = {"lora_dropout": 0.1}
# Name -> family, layout with the changes of ``train``, changes of the adapter. In those with parts attention may not be
# traced, as with Transformer Engine.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "SP+dropout+selective": ("qwen3", {"tensor": 2, "train": {"recompute": "selective"}}, DROPOUT),
    "PP+dropout+full": ("qwen3", {"pipeline": 2, "train": {"recompute": "full"}}, DROPOUT),
    "parts, SP+dropout+full": ("qwen3", {"tensor": 2, "train": {"recompute": "full"}}, DROPOUT),
    "parts, SPxEP": ("qwen3_moe", {"tensor": 2, "expert": 2}, {}),
    "CPxEP": ("qwen3_moe", {"context": 2, "expert": 2, "train": {"overlap_grad_reduce": True}}, {}),
}
# In float32. A large epsilon keeps AdamW from making a learning rate out of the rounding of a gradient near zero.
BOUND, LR, EPSILON = 1e-4, 1e-3, 1e-3


def train(folder: Path, case: str, *, compiled: bool) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Return what each update computed, and the compilations of each."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megarl.model.layers.attention.core import PackedAttention
    from megarl.model.step.graphs import ALIGNED
    from megarl.parallel.groups import leave_layout

    leave_layout()
    PackedAttention.can_trace = "parts" not in case
    family, layout, lora = CASES[case]
    settings = layout | {"train": {"compile": compiled, "adam_eps": EPSILON, **layout.get("train", {})}}
    model = build(folder, settings, "float32", family, **lora)
    # Dropout draws for the padding too.
    model._multiple = model.config.parallel.tensor * ALIGNED
    model_parallel_cuda_manual_seed(5)
    results, compilations = [], []
    for result in updates(model, COUNTS, LR, base="SP" in case):
        results.append(result)
        compilations.append(model.measured().get("compilations", -1.0))
    results[-1]["seen by hooks"] = seen_by_hooks(model)
    return results, compilations


def seen_by_hooks(model: Any) -> torch.Tensor:
    """Run a pass uncompiled; return what a hook in the first layer sees, which a compiled one would not run."""
    from megarl.model.step.compiled import uncompiled

    batch, seen = batch_of(model, 0, COUNTS[-1]), list[torch.Tensor]()
    linear = model.chunks[0].decoder.layers[0].self_attention.linear_proj
    handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(output[0].clone()))
    with uncompiled(model.chunks):
        model.forward(batch)
    handle.remove()
    model.forward(batch)
    return torch.cat([tensor.flatten() for tensor in seen])


def compare(folder: str, cases: list[str]) -> dict[str, Any]:
    """Return, for each case, the largest difference and the compilations of each update."""
    from megarl.model.step import compiled

    compiled.BACKEND = "aot_eager"
    found = {}
    for case in cases:
        plain, _ = train(Path(folder), case, compiled=False)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results, compilations = train(Path(folder), case, compiled=True)
        errors = [relative_error(mine[n], theirs[n]) for mine, theirs in zip(results, plain, strict=True) for n in mine]
        moved = all(tensor.abs().max() > 0 for tensor in plain[-1].values())
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        found[case] = max(errors), compilations, breaks, moved
    return found


def check(results: list[dict[str, Any]], cases: list[str]) -> None:
    """Check what ``compare`` returned on every rank."""
    for result in results:
        assert list(result) == cases
        for case, (error, compilations, breaks, moved) in result.items():
            assert moved and error < BOUND, (case, error)
            assert compilations[0] > 0 and not any(compilations[1:]), (case, compilations)
            assert not breaks, case


def operators(rank_folder: str) -> None:
    """Check the operators that communicate: schema, fake, autograd and traces with dynamic shapes."""
    from megarl.model.layers import regions
    from megarl.model.layers.attention import traced_attention
    from megarl.parallel.device import backend, pick_device

    dist.init_process_group(backend(pick_device("cpu")))
    name, tensor = dist.group.WORLD.group_name, torch.randn(6, 2, 3)
    opcheck(regions.all_reduce.overload, (tensor, name))
    opcheck(regions.all_gather.overload, (tensor, name, 2))
    opcheck(regions.reduce_scatter.overload, (tensor, name, 2))
    rows = torch.tensor([0, 7, 7, 3, 11])
    opcheck(traced_attention.gather_rows.overload, (tensor.requires_grad_(), rows, name, 2))
    opcheck(traced_attention.sum_rows.overload, (torch.randn(5, 2, 3), rows, tensor.detach(), name, 2))
    dist.destroy_process_group()


def write_joint_graph(folder: str) -> None:
    """Write the graph of a layer, as `megarl bench train --graph` does."""
    from megarl.bench.training.joint_graph import write_graph

    model = build(Path(folder), {}, "float32", "qwen3")
    batch = model.pack(make_samples(4, SHAPE["vocab_size"], seed=0), np.full(4, 0.05))
    write_graph(model.chunks, lambda: model.forward_backward(batch, SurrogateLoss()), Path(folder) / "graph.py")


@pytest.fixture
def folder(tmp_path):
    for family in ("qwen3", "qwen3_moe"):
        make_model(tmp_path / family, family, tied=family == "qwen3", num_hidden_layers=2)
    return tmp_path


# tests/newest runs the last one, on the newest megatron-core.
@pytest.mark.parametrize("cases", [list(CASES)[:3], pytest.param(list(CASES)[3:], marks=pytest.mark.long)], ids=str)
def test_compiled_layers_change_nothing_and_compile_once(folder, cases):
    check(run_ranks(compare, 2, str(folder), cases), cases)


def test_operators_that_communicate_are_sound(tmp_path):
    run_ranks(operators, 2, str(tmp_path))


def test_the_graph_of_a_layer_holds_both_passes(folder):
    run_ranks(write_joint_graph, 1, str(folder))
    graph = (folder / "graph.py").read_text()
    assert "def forward(self, primals, tangents)" in graph
    for operator in ("attend", "attend_backward", "adapted_linear", "adapted_linear_backward"):
        assert graph.count(f"torch.ops.megarl.{operator}.default") == (1 if "attend" in operator else 4), operator
