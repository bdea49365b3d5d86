# SPDX-License-Identifier: Apache-2.0
"""Compiled layers do not change training: logprobs, gradients and updates, over packs of changing shapes.

In float32 both must agree. In bfloat16 the compiler rounds elsewhere: the worst error against float32 must be at most
1.5 times that of uncompiled layers. Dropout and mixtures of experts are compared in float32 only. The layouts are one
GPU, and with two: TP with SP and dropout, PP with full recomputation, CP, and a mixture of experts. On one GPU also
with CUDA graphs of the compiled layers. With Transformer Engine, also around its attention. Dense layers in 16 bits
without dropout are called directly, so that nothing is compiled of them; also in traces.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.verify.inputs.adapters import make_adapter
from tests.gpu.test_graphs import BATCHES, EPSILON, LR, worst
from tests.helpers.cases import make_config
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# Largest relative difference in float32, and the largest error in bfloat16 over that without the compiler.
BOUND, WORSE = 1e-4, 1.5
DTYPES = ("float32", "bfloat16")
# Family, layout, changes of ``train``, the adapter's dropout.
ONE: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "one GPU": ("qwen3", {}, {}, 0.0),
    "in traces": ("qwen3", {}, {}, 0.0),
    "dropout, recomputed": ("qwen3", {}, {"recompute": "full"}, 0.1),
    "experts": ("qwen3_moe", {}, {}, 0.0),
    "with CUDA graphs": ("qwen3", {}, {"cuda_graphs": True}, 0.0),
    "te, recomputed": ("qwen3", {"backend": "te"}, {"recompute": "full"}, 0.0),
    "te, experts": ("qwen3_moe", {"backend": "te"}, {}, 0.0),
    "te, in traces": ("qwen3", {"backend": "te"}, {"cuda_graphs": True}, 0.0),
    "te, with CUDA graphs": ("qwen3", {"backend": "te"}, {"cuda_graphs": True}, 0.0),
}
# Tensor parallel ranks compile what is before and behind attention. So do, in 16 bits, these.
COMPILED = "in traces", "TP"
TWO: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "TP+SP, dropout": ("qwen3", {"tensor": 2}, {}, 0.1),
    "PP, recomputed": ("qwen3", {"pipeline": 2}, {"recompute": "full"}, 0.0),
    "CP": ("qwen3", {"context": 2}, {}, 0.0),
    "TP+SPxEP": ("qwen3_moe", {"tensor": 2, "expert": 2}, {}, 0.0),
    "te, TP+SP": ("qwen3", {"tensor": 2, "backend": "te"}, {}, 0.0),
}


def train_each(folder: str, cases: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float, list[float], bool]]:
    """On each rank, for each ``(case, dtype)``: the largest error, its bound, the compilations of each update.

    Last, whether layers were called directly.
    """
    from megarl.config import checks
    from megarl.model.layers import transformer_layer
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups, leave_layout

    checks.check_graphs = lambda *given: None
    found, directly = {}, transformer_layer.directly
    for name, (family, layout, changes, dropout) in cases.items():
        leave_layout()
        groups = None
        # In 16 bits rounding may choose another expert, and dropout draws another mask than in float32.
        dtypes = DTYPES if family == "qwen3" and not dropout else DTYPES[:1]
        for dtype in DTYPES[1:] if "in traces" in name else dtypes:
            calls: list[bool] = []

            def call(*given: Any, never: bool = "in traces" in name, calls: list[bool] = calls) -> Any:
                result = None if never else directly(*given)
                calls.append(result is not None)
                return result

            transformer_layer.directly = call
            model = Path(folder) / f"{family}-{dtype}"
            config = make_config(model / "model", layout, dtype)
            groups = groups or init_groups(config.parallel, pick_device("auto"))
            eager = {k: v for k, v in changes.items() if k != "cuda_graphs"}
            plain, _ = train(config, model, groups, eager, dropout)
            torch._dynamo.reset()
            results, compilations = train(config, model, groups, changes | {"compile": True}, dropout)
            truth, bound = plain, BOUND
            if dtype != "float32":
                truth, _ = train(make_config(model / "model", layout, "float32"), model, groups, eager, dropout)
                bound = WORSE * worst(plain, truth)
            error = worst(results, truth)
            found[name, dtype] = error, bound, compilations, any(calls)
            # At once: a run that is cut off has shown its cases until then.
            told = f"{name} {dtype}: worst {error:.1e} of {bound:.1e}, compilations {compilations}, {any(calls)=}"
            print(f"\nrank {torch.distributed.get_rank()}: {told}", file=sys.stderr, flush=True)
    destroy_groups()
    return found


def train(
    config: Any, folder: Path, groups: Any, changes: dict[str, Any], dropout: float
) -> tuple[list[torch.Tensor], list[float]]:
    """Return all results of a few steps on batches of different sizes, and the compilations of each step."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megarl.config import parse_config
    from megarl.lora import attach, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from tests.helpers.updates import updates

    tree = config.model_dump()
    tree["train"] |= {"micro_batch_tokens": 256, "adam_eps": EPSILON, **changes}
    peft = load_peft_config(folder / "adapter")
    peft.lora_dropout = dropout
    model = MegatronModel(parse_config(tree).trainer, groups, attach(peft))
    model.load_adapter(folder / "adapter")
    model._multiple = 32 * groups.topology.tensor  # the same padding on both sides, for which dropout draws too
    model_parallel_cuda_manual_seed(5)
    results, compilations = [], []
    for found in updates(model, BATCHES, LR):
        results += found.values()
        compilations.append(model.measured().get("compilations", 0.0))
    return results, compilations


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_layers_change_nothing_and_compile_once(tmp_path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for dtype in DTYPES:
        for family in ("qwen3", "qwen3_moe"):
            sizes = {"hidden_size": 256, "head_dim": 64}
            folder = tmp_path / f"{family}-{dtype}"
            make_model(folder / "model", family, tied=family == "qwen3", dtype=dtype, **sizes)
            make_adapter(folder / "model", folder / "adapter", r=8)
    has_te = importlib.util.find_spec("transformer_engine") is not None
    cases = {name: case for name, case in (ONE if world == 1 else TWO).items() if has_te or "backend" not in case[1]}
    for found in run_ranks(train_each, world, str(tmp_path), cases):
        for (case, dtype), (error, bound, compilations, direct) in found.items():
            assert error <= bound, (case, dtype)
            assert direct is (dtype != "float32" and not any(word in case for word in COMPILED)), case
            # A graph is captured for each size, and compiles nothing of its own.
            assert (direct or compilations[0] > 0) and not any(compilations[1:]), case
