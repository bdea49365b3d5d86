"""Training by CUDA graphs is training without them: logprobs, gradients and updates, over packs of changing shapes."""

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

STEPS, LR = 4, 1e-3


def train(folder: str, dtype: str, backend: str, world: int) -> dict[str, Any]:
    """On each rank: the same steps without graphs and with them, on batches of other sizes in each step."""
    from megarl.config import checks, parse_config
    from megarl.lora import apply_lora, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    checks.GRAPHS_PROVEN = True
    root, found = Path(folder), {}
    layout = {"tensor": world} if world > 1 else {}
    tree = make_config(root / "model", layout | {"backend": backend}, dtype).model_dump()
    groups = init_groups(parse_config(tree).parallel, pick_device("auto"))
    for graphs in (False, True):
        tree["train"] |= {"cuda_graphs": graphs, "micro_batch_tokens": 256}
        config = parse_config(tree)
        attach: Any = lambda c, hf, g: apply_lora(c, load_peft_config(root / "adapter"), hf, groups=g)  # noqa: E731
        model = MegatronModel(config, groups, attach)
        model.load_adapter(root / "adapter")
        results: list[Any] = []
        for step in range(STEPS):
            samples = make_samples(5 + 7 * step, SHAPE["vocab_size"], seed=step)
            batch = model.pack(samples, np.full(len(samples), 0.05))
            results += [*model.forward(batch), *model.forward(batch, adapter=False)]
            model.forward_backward(batch, SurrogateLoss())
            results += [tensor.cpu().clone() for tensor in model.gradients().values()]
            results.append(model.optim_step(LR)["grad_norm"])
        results += [tensor.cpu().clone() for _, tensor in model.export_weights(adapter_only=True)]
        found[graphs] = [torch.as_tensor(result) for result in results]
    destroy_groups()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", ["local", "te"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_nothing(tmp_path, dtype, backend, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if backend == "te":
        pytest.importorskip("transformer_engine")
    make_model(tmp_path / "model", "qwen3", tied=True, dtype=dtype, hidden_size=256, head_dim=64)
    make_adapter(tmp_path / "model", tmp_path / "adapter")
    bound = 1e-4 if dtype == "float32" else 2e-2
    for found in run_ranks(train, world, str(tmp_path), dtype, backend, world):
        errors = [relative_error(ours, theirs) for ours, theirs in zip(found[True], found[False], strict=True)]
        print(f"\n{dtype} {backend} TP{world}: {len(errors)} comparisons, worst {max(errors):.1e}")
        assert max(errors) <= bound
