"""A model whose linears compute base and adapter in one product, as on CUDA, against the same model without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megarl.verify.adapters import make_adapter
from megarl.verify.compare import relative_error
from megarl.verify.loss import SurrogateLoss
from megarl.verify.samples import make_samples
from tests.helpers.cases import make_config
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks

pytest.importorskip("triton")

# The second adapter has other ranks than the room was made for.
CONFIGS: dict[str, dict[str, Any]] = {
    "first": {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "r": 8},
    "second": {"target_modules": ["q_proj", "k_proj", "up_proj"], "r": 4},
}
# With room or without, and what is recomputed: then the backward pass writes the room behind the inputs once more.
VARIANTS = [(False, {}), (True, {}), *((True, {"train": {"recompute": kind}}) for kind in ("selective", "full"))]


def apart(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Its copy with columns behind each row that nobody may read before they are written."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + columns), torch.nan)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, spare: int) -> torch.Tensor:
    """In the place of the kernel."""
    return apart(F.rms_norm(hidden, weight.shape, weight, eps), spare)


def swiglu(fused: torch.Tensor, spare: int) -> torch.Tensor:
    """In the place of the kernel."""
    gate, up = fused.chunk(2, dim=-1)
    return apart(F.silu(gate) * up, spare)


def addresses(chunks: list) -> dict[str, int]:
    """Where the weights lie."""
    return {name: weight.data_ptr() for chunk in chunks for name, weight in chunk.named_parameters()}


def compute(folder: str) -> list[dict[str, Any]]:
    """Everything a model does with two adapters, at each of ``VARIANTS``."""
    from megarl.config import ParallelConfig
    from megarl.lora import apply_lora, layers, load_peft_config
    from megarl.lora.adapter import wrapped_layers
    from megarl.model import gpt, mlp
    from megarl.model.kernels import norm as norm_kernel
    from megarl.model.kernels import swiglu as swiglu_kernel
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    root, results = Path(folder), []
    groups = init_groups(ParallelConfig(), pick_device("auto"))

    def attach(chunks: list, hf: Any, groups: Any) -> list:
        return [apply_lora(chunks, load_peft_config(root / n), hf, name=n, groups=groups) for n in CONFIGS]

    for room, recompute in VARIANTS:
        with pytest.MonkeyPatch.context() as patch:
            for module in (layers, gpt, mlp):
                patch.setattr(module, "wants_kernels", lambda tensor, room=room: room)
            patch.setattr(norm_kernel, "rms_norm", norm)
            patch.setattr(swiglu_kernel, "swiglu", swiglu)
            model, found = MegatronModel(make_config(root / "model", recompute), groups, attach), {}
            samples = make_samples(6, SHAPE["vocab_size"], seed=0)
            batch = model.pack(samples, np.full(len(samples), 0.05))
            for name in CONFIGS:
                model.set_active(name)
                model.load_adapter(root / name)
            # Graphs of this pass would hold the weights' addresses.
            found["off"] = torch.from_numpy(np.concatenate(model.forward(batch, adapter=False)))
            where = addresses(model.chunks)
            for name in ("first", "second", "first"):
                model.set_active(name)
                model.forward_backward(batch, SurrogateLoss())
                found |= {f"{name} gradient {n}": t for n, t in model.gradients().items()}
                model.optim_step(1e-3)
                for adapter in (True, False):
                    flat = np.concatenate(model.forward(batch, adapter=adapter))
                    found[f"{name} logprobs {adapter}"] = torch.from_numpy(flat)
            found |= {f"merged {n}": t.clone() for n, t in model.export_merged()}
            found |= {f"base {n}": t.clone() for n, t in model.export_weights(adapter_only=False)}
            assert addresses(model.chunks) == where
            moved = [getattr(layer, "room", None) is not None for layer in wrapped_layers(model.chunks)]
            found["moved"] = torch.tensor(sum(moved), dtype=torch.float32)
            results.append(found)
    return results


def test_room_changes_nothing_but_the_order_of_sums(tmp_path):
    make_model(tmp_path / "model", "llama", tied=False)
    for seed, (name, config) in enumerate(CONFIGS.items()):
        make_adapter(tmp_path / "model", tmp_path / name, seed=seed, **config)
    [(without, *with_room)] = run_ranks(compute, 1, str(tmp_path))
    assert without.pop("moved") == 0
    for found in with_room:
        # qkv, fc1 and fc2 of every layer; attention's output leaves no room for proj.
        assert found.pop("moved") == 3 * SHAPE["num_hidden_layers"]
        assert without.keys() == found.keys()
        for name, expected in without.items():
            if name.startswith("base"):
                assert torch.equal(found[name], expected), name
            assert relative_error(found[name], expected) < 1e-5, name
