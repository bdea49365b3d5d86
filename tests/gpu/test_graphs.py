# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs do not change training: logprobs, gradients and updates, over packs of changing shapes."""

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
# Float32 differs by the order in which attention's gradient is added up; in bf16 rounding itself.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
# ``numerics: bitwise``, on ``local``.
BITWISE = "bitwise"
BATCHES, LR = (5, 12, 26), 1e-3


def train_each(folder: str, kinds: list[tuple[str, str]], world: int) -> dict[tuple[str, str], float]:
    """On each rank, return the largest difference that graphs make, for each ``(dtype, back end)``."""
    from megarl.config import checks
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    checks.check_graphs = lambda *given: None
    layout = {"tensor": world} if world > 1 else {}
    worst, groups = {}, None
    for dtype, backend in kinds:
        given = {"backend": "local" if backend == BITWISE else backend}
        config = make_config(Path(folder) / dtype / "model", layout | given, dtype)
        if backend == BITWISE:
            config = config.model_copy(update={"model": config.model.model_copy(update={"numerics": BITWISE})})
        groups = groups or init_groups(config.parallel, pick_device("auto"))
        plain, graphed = (train(config, Path(folder) / dtype / "adapter", groups, graphs) for graphs in (False, True))
        worst[dtype, backend] = max(relative_error(ours, theirs) for ours, theirs in zip(graphed, plain, strict=True))
    destroy_groups()
    return worst


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
    for dtype in BOUNDS:
        model = make_model(tmp_path / dtype / "model", "qwen3", tied=True, dtype=dtype, hidden_size=256, head_dim=64)
        make_adapter(model, tmp_path / dtype / "adapter", r=8)
    kinds = [*product(BOUNDS, backends), *([("bfloat16", BITWISE)] if world == 1 else [])]
    for worst in run_ranks(train_each, world, str(tmp_path), kinds, world):
        for (dtype, backend), error in worst.items():
            print(f"\n{dtype} {backend} TP{world}: worst {error:.1e} of {BOUNDS[dtype]:.0e}")
            assert error <= BOUNDS[dtype]
        assert set(worst) == set(kinds)
