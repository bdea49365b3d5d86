"""Training by CUDA graphs is training without them: logprobs, gradients and updates, over packs of changing shapes."""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.verify.adapters import make_adapter
from megarl.verify.compare import relative_error
from megarl.verify.loss import SurrogateLoss
from megarl.verify.samples import make_samples
from tests.helpers.cases import make_config
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# Largest relative error of any logprobs or gradient of the same weights, and of how far updates moved the adapter, by
# norm: padded packs are rounded otherwise, which AdamW magnifies.
BOUNDS = {"float32": (1e-4, 2e-3), "bfloat16": (2e-2, 1e-1)}
BATCHES, LR = (5, 12, 26), 1e-3


def train_each(folder: str, kinds: list[tuple[str, str]], world: int) -> dict[tuple[str, str], tuple[float, float]]:
    """On each rank: for each ``(dtype, back end)`` the differences that graphs make, as for ``BOUNDS``."""
    from megarl.config import checks
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    checks.check_graphs = lambda *given: None
    layout = {"tensor": world} if world > 1 else {}
    worst, groups = {}, None
    for dtype, backend in kinds:
        config = make_config(Path(folder) / dtype / "model", layout | {"backend": backend}, dtype)
        groups = groups or init_groups(config.parallel, pick_device("auto"))
        adapter = Path(folder) / dtype / "adapter"
        (plain, plain_update), (graphed, update) = (train(config, adapter, groups, graphs) for graphs in (False, True))
        largest = max(relative_error(ours, theirs) for ours, theirs in zip(graphed, plain, strict=True))
        worst[dtype, backend] = largest, float((update - plain_update).norm() / plain_update.norm())
    destroy_groups()
    return worst


def train(config: Any, adapter: Path, groups: Any, graphs: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Everything that a few steps on batches of different sizes give, and how far the adapter moved."""
    from megarl.config import parse_config
    from megarl.lora import apply_lora, load_peft_config
    from megarl.model.megatron_model import MegatronModel

    tree = config.model_dump()
    tree["train"] |= {"cuda_graphs": graphs, "micro_batch_tokens": 256}
    attach: Any = lambda c, hf, g: apply_lora(c, load_peft_config(adapter), hf, groups=g)  # noqa: E731
    model = MegatronModel(parse_config(tree), groups, attach)
    model.load_adapter(adapter)
    results: list[Any] = []
    start = whole_adapter(model)
    for step, count in enumerate(BATCHES + BATCHES):
        samples = make_samples(count, SHAPE["vocab_size"], seed=step)
        batch = model.pack(samples, np.full(len(samples), 0.05))
        if step < len(BATCHES):
            results += [*model.forward(batch), *model.forward(batch, adapter=False)]
        model.forward_backward(batch, SurrogateLoss())
        if step < len(BATCHES):
            results += [tensor.cpu().clone() for tensor in model.gradients().values()]
        model.optim_step(LR if step >= len(BATCHES) else 0.0)
    return [torch.as_tensor(result) for result in results], whole_adapter(model) - start


def whole_adapter(model: Any) -> torch.Tensor:
    """Every element of the adapter, flat."""
    return torch.cat([tensor.cpu().double().flatten() for _, tensor in model.export_weights(adapter_only=True)])


@pytest.mark.parametrize("world", [1, 2])
def test_graphs_change_nothing(tmp_path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    backends = ["local", "te"] if importlib.util.find_spec("transformer_engine") else ["local"]
    for dtype in BOUNDS:
        model = make_model(tmp_path / dtype / "model", "qwen3", tied=True, dtype=dtype, hidden_size=256, head_dim=64)
        make_adapter(model, tmp_path / dtype / "adapter")
    kinds = list(product(BOUNDS, backends))
    for worst in run_ranks(train_each, world, str(tmp_path), kinds, world):
        for (dtype, backend), errors in worst.items():
            found = [f"{error:.1e} of {bound:.0e}" for error, bound in zip(errors, BOUNDS[dtype], strict=True)]
            print(f"\n{dtype} {backend} TP{world}: worst {found[0]}, update {found[1]}")
            assert all(error <= bound for error, bound in zip(errors, BOUNDS[dtype], strict=True))
        assert set(worst) == set(kinds)
