# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs do not change training: logprobs, gradients and updates, over packs of changing shapes.

In float32 both must agree. In bfloat16 padding may change which kernel multiplies: the worst error against float32 must
be at most 1.5 times that without graphs. ``numerics: bitwise`` must give the same bits.
"""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.cases import make_config
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# Keeps AdamW from making a learning rate out of the rounding of a gradient near zero.
EPSILON = 1e-3
# Largest relative difference in float32, and the largest error in bfloat16 over that without graphs.
BOUND, WORSE = 1e-4, 1.5
DTYPES = ("float32", "bfloat16")
# ``numerics: bitwise``, on ``local``.
BITWISE = "bitwise"
BATCHES, LR = (5, 12, 26), 1e-3


def train_each(folder: str, kinds: list[tuple[str, str]], world: int) -> dict[tuple[str, str], tuple[float, float]]:
    """On each rank, return the largest error with graphs and its bound, for each ``(dtype, back end)``."""
    from megarl.config import checks
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    checks.check_graphs = lambda *given: None
    layout = {"tensor": world} if world > 1 else {}
    found, groups, truths = {}, None, {}
    for dtype, backend in kinds:
        given = {"backend": "local" if backend == BITWISE else backend}
        config = make_config(Path(folder) / "model", layout | given, dtype)
        if backend == BITWISE:
            config = config.model_copy(update={"model": config.model.model_copy(update={"numerics": BITWISE})})
        groups = groups or init_groups(config.parallel, pick_device("auto"))
        plain, graphed = (train(config, Path(folder) / "adapter", groups, graphs) for graphs in (False, True))
        truth = truths.setdefault(given["backend"], plain)  # of float32, which comes first
        if backend == BITWISE:
            found[dtype, backend] = worst(graphed, plain), 0.0
        else:
            found[dtype, backend] = worst(graphed, truth), BOUND if truth is plain else WORSE * worst(plain, truth)
    destroy_groups()
    return found


def worst(results: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Return the largest relative error."""
    return max(relative_error(ours, theirs) for ours, theirs in zip(results, truth, strict=True))


def train(config: Any, adapter: Path, groups: Any, graphs: bool) -> list[torch.Tensor]:
    """Return all results of a few steps on batches of different sizes."""
    from megarl.config import parse_config
    from megarl.lora import attach, load_peft_config
    from megarl.model.megatron_model import MegatronModel

    tree = config.model_dump()
    tree["train"] |= {"cuda_graphs": graphs, "micro_batch_tokens": 256, "adam_eps": EPSILON}
    model = MegatronModel(parse_config(tree).trainer, groups, attach(load_peft_config(adapter)))
    model.load_adapter(adapter)
    results: list[Any] = []
    for step, count in enumerate(BATCHES):
        samples = make_samples(count, SHAPE["vocab_size"], seed=step)
        batch = model.pack(samples, np.full(len(samples), 0.05))
        results += [*model.forward(batch, adapter=False), *model.forward(batch)]
        model.forward_backward(batch, SurrogateLoss())
        results += [tensor.cpu().clone() for tensor in model.gradients().values()]
        results.append(model.optim_step(LR)["grad_norm"])
    results += [tensor.cpu().clone() for _, tensor in model.export_weights(adapter_only=True)]
    return [torch.as_tensor(result) for result in results]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_graphs_change_nothing(tmp_path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    backends = ["local", "te"] if importlib.util.find_spec("transformer_engine") else ["local"]
    model = make_model(tmp_path / "model", "qwen3", tied=True, dtype="bfloat16", hidden_size=256, head_dim=64)
    make_adapter(model, tmp_path / "adapter", r=8)
    kinds = [*product(DTYPES, backends), *([("bfloat16", BITWISE)] if world == 1 else [])]
    for found in run_ranks(train_each, world, str(tmp_path), kinds, world):
        assert set(found) == set(kinds)
        for (dtype, backend), (error, bound) in found.items():
            print(f"\n{dtype} {backend} TP{world}: worst {error:.1e} of {bound:.1e}")
        for kind, (error, bound) in found.items():
            assert error <= bound, kind
