"""Both back ends on CUDA against Hugging Face + PEFT: float32 to the CPU's bounds, bf16 no worse than Hugging Face.

One process does all the work of megarl, because starting one takes longer than the work. Float32 through Transformer
Engine is exact only with NVIDIA_TF32_OVERRIDE=0 in the environment; without it, those tests are skipped.
"""

import importlib.util
import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_parity import LR, STEPS, compare, make_config, train_steps
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_reference, logprobs_of, make_adapter, make_samples, run_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

FAMILIES, BACKENDS, DTYPES = ("qwen3", "llama"), ("local", "te"), ("float32", "bfloat16")
# Multiples of 16 everywhere: what 16-bit tensor cores and the fused kernels ask for. The vocabulary stays odd.
SIZES = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64}
WEIGHT = 0.05
MOVED = "a checkpoint of te in local"


def runs(backend: str, dtype: str) -> bool:
    """Whether this host can run it exactly."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
    exact = dtype == "bfloat16" or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    return backend == "local" or (has_te and exact)


def build(folder: Path, backend: str, dtype: str) -> Any:
    """A model with its adapter on this process's GPU."""
    from megarl.config import parse_config
    from megarl.lora import apply_lora, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups

    tree = make_config(folder / "model", {}).model_dump()
    tree["model"] |= {"dtype": dtype, "backend": backend}
    config = parse_config(tree)
    peft_config = load_peft_config(folder / "adapter")
    groups = init_groups(config.parallel, pick_device("auto"))
    model = MegatronModel(config, groups, lambda c, hf, g: apply_lora(c, peft_config, hf, groups=g))
    model.load_adapter(folder / "adapter")
    return model


def train(folder: Path, backend: str, dtype: str) -> dict:
    """Everything that is compared, and the base weights as they are exported."""
    model = build(folder, backend, dtype)
    batch = model.pack(make_samples(10, SHAPE["vocab_size"]), np.full(10, WEIGHT))
    result = train_steps(model, batch, STEPS)
    result["weights"] = {n: t.cpu() for n, t in model.export_weights(adapter_only=False)}
    if backend == "te" and dtype == "float32":
        model.save_checkpoint(folder / "checkpoint")
        other = build(folder, "local", dtype)
        other.load_checkpoint(folder / "checkpoint")
        result[MOVED] = model.forward(batch), other.forward(batch)
    return result


def train_all(root: str) -> dict[str, Any]:
    """Every combination that runs here; what fails is a traceback in the place of its result."""
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            for backend in BACKENDS:
                if not runs(backend, dtype):
                    continue
                try:
                    results[f"{family} {dtype} {backend}"] = train(Path(root) / f"{family}-{dtype}", backend, dtype)
                except Exception:
                    results[f"{family} {dtype} {backend}"] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and adapters."""
    root = tmp_path_factory.mktemp("te")
    for family in FAMILIES:
        for dtype in DTYPES:
            model = make_model(root / f"{family}-{dtype}" / "model", family, tied=False, dtype=dtype, **SIZES)
            make_adapter(model, root / f"{family}-{dtype}" / "adapter")
    return root


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, Any]:
    """What megarl computes."""
    return run_ranks(train_all, 1, str(root))[0]


def result_of(results: dict[str, Any], family: str, dtype: str, backend: str) -> dict:
    """A result, or a skip or a failure with its reason."""
    if not runs(backend, dtype):
        pytest.skip(f"{backend} {dtype} needs Transformer Engine, and NVIDIA_TF32_OVERRIDE=0 in float32")
    result = results[f"{family} {dtype} {backend}"]
    assert not isinstance(result, str), result
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_peft(root: Path, results: dict[str, Any], family: str, backend: str) -> None:
    from safetensors.torch import load_file

    result = result_of(results, family, "float32", backend)
    folder = root / f"{family}-float32"
    samples = make_samples(10, SHAPE["vocab_size"])
    truth = run_reference(folder / "model", folder / "adapter", samples, np.full(10, WEIGHT), STEPS, LR)
    rows = sorted(compare(result, truth), key=lambda row: row[1] / row[2])
    print(f"\nfloat32 {family} {backend}: {len(rows)} comparisons, worst {rows[-1][0]}: {rows[-1][1]:.1e}")
    assert rows[-1][1] <= rows[-1][2], rows[-5:]
    original = load_file(folder / "model" / "model.safetensors")
    assert result["weights"].keys() == original.keys()
    assert all(torch.equal(result["weights"][name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_moves_between_back_ends(results: dict[str, Any], family: str) -> None:
    saved, loaded = result_of(results, family, "float32", "te")[MOVED]
    assert max(np.abs(a - b).max() for a, b in zip(saved, loaded, strict=True)) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_further_from_float32_than_hugging_face(
    root: Path, results: dict[str, Any], family: str, backend: str
) -> None:
    result = result_of(results, family, "bfloat16", backend)
    folder = root / f"{family}-bfloat16"
    exact_logprobs, exact = reference(folder, torch.float32)
    their_logprobs, theirs = reference(folder, torch.bfloat16)
    errors = (torch.from_numpy(np.concatenate(result["logprobs"])) - exact_logprobs).abs().mean()
    their_errors = (their_logprobs - exact_logprobs).abs().mean()
    distance, their_distance = relative_distance(result["gradients"], exact), relative_distance(theirs, exact)
    print(
        f"\nbf16 {family} {backend}: mean |logprob error| {errors:.2e} (Hugging Face {their_errors:.2e}), "
        f"gradient distance {distance:.2e} (Hugging Face {their_distance:.2e})"
    )
    assert 0 < errors <= 1.1 * their_errors
    assert 0 < distance <= 1.1 * their_distance


def reference(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hugging Face + PEFT on this GPU: logprobs of all samples, and the gradients of the surrogate loss."""
    model = load_reference(folder / "model", folder / "adapter", dtype).cuda()
    parts = []
    for sample in make_samples(10, SHAPE["vocab_size"]):
        parts.append(logprobs_of(model, sample))
        (-WEIGHT * sample.advantage * parts[-1].sum()).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return torch.cat([part.detach().float().cpu() for part in parts]), gradients


def relative_distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the exact ones."""
    assert found.keys() == exact.keys()
    difference = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in exact.values())) ** 0.5
