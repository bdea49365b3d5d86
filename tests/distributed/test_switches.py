# SPDX-License-Identifier: Apache-2.0
"""Check that mcore's switches change memory and time, but no bit of the numbers.

test_parity.py compares with PEFT. Here also bf16 and dropout, whose random states recomputation must repeat.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import MegarlError
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build

SP, PP, VPP, DP = {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"data": 2}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
DISTRIBUTED, REDUCE = {"distributed_optimizer": True}, {"overlap_grad_reduce": True}
OVERLAP = DISTRIBUTED | REDUCE | {"overlap_param_gather": True}
FIRST = FULL | {"recompute_layers": 1}
# Model, layout, and settings that must not change the numbers.
CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("float32", DP, [DISTRIBUTED, OVERLAP]),
    ("bfloat16", DP, [DISTRIBUTED, REDUCE, OVERLAP | FULL]),
    ("bfloat16", SP, [FULL, SELECTIVE]),
    ("bfloat16", SP | {"sequence": False}, [FULL]),
    ("bfloat16", PP, [SELECTIVE]),
    ("bfloat16", VPP, [FIRST, OVERLAP | FULL]),
    ("bfloat16", {"context": 2}, [OVERLAP | FULL]),
    ("experts", DP | {"expert": 2}, [OVERLAP | FULL]),
]


def run_cases(folder: str) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return case -> settings -> everything that this rank computed."""
    from megarl.parallel.groups import leave_layout

    results = {}
    for index, (model, layout, variants) in enumerate(CASES):
        leave_layout()
        results[index] = {str(train): compute(Path(folder), layout, train, model) for train in [{}, *variants]}
    return results


def compute(folder: Path, layout: dict[str, Any], train: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """Return gradients, logprobs, norms and weights of three steps, each of two accumulated batches."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    # Without clipping, which scales by a norm whose order of summation depends on the shards.
    settings = layout | {"train": {"max_grad_norm": 0.0, **train}}
    dropout = {"lora_dropout": 0.0} if name == "experts" else {}
    model = build(folder, settings, "float32" if name == "float32" else "bfloat16", name, **dropout)
    model_parallel_cuda_manual_seed(5)
    loss, weights, results = SurrogateLoss(), np.full(4, 0.05), {}
    for step in range(3):
        first, second = (model.pack(make_samples(4, SHAPE["vocab_size"], seed=2 * step + i), weights) for i in (0, 1))
        model.forward_backward(first, loss, last=False)
        model.forward_backward(second, loss)
        if train.get("overlap_grad_reduce"):
            with pytest.raises(MegarlError, match="pass last=False"):
                model.forward_backward(second, loss)
        if step != 1:  # with and without gathering the whole gradient in between
            results |= {f"gradient {step} {name}": tensor for name, tensor in model.gradients().items()}
        results[f"norm {step}"] = torch.tensor(model.optim_step(1e-3)["grad_norm"])
        if step != 1:  # a forward pass right after the update, and an export right after it
            results[f"logprobs {step}"] = torch.from_numpy(np.concatenate(model.forward(first)))
        results |= {f"adapter {step} {name}": tensor.clone() for name, tensor in model.export_weights(True)}
    results |= {f"main {name}": tensor.clone() for name, tensor in model.optimizer.main_weights().items()}
    for kind, tensors in model.optimizer.moments().items():
        results |= {f"{kind} {name}": tensor.clone() for name, tensor in tensors.items()}
    return results


def test_switches_change_no_bit(tmp_path):
    for dtype in ("float32", "bfloat16"):
        make_model(tmp_path / dtype, "qwen3", tied=True, dtype=dtype)
    make_model(tmp_path / "experts", "mixtral", tied=False, dtype="bfloat16", num_hidden_layers=2)
    for results in run_ranks(run_cases, 2, str(tmp_path)):
        for index, variants in results.items():
            plain = variants.pop("{}")
            assert all(plain[name].abs().max() > 0 for name in plain if name.startswith("gradient 2")), CASES[index][0]
            for train, result in variants.items():
                assert result.keys() == plain.keys()
                norms = {name for name in plain if name.startswith("norm")}
                different = [name for name in plain.keys() - norms if not torch.equal(result[name], plain[name])]
                assert not different, (CASES[index][0], train, sorted(different)[:5])
                assert all(abs(result[name] / plain[name] - 1) < 1e-6 for name in norms)
