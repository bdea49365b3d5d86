"""Promise 1: logprobs, LoRA gradients and the updated adapter equal one process of Hugging Face + PEFT, in fp32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import ParallelConfig, RunConfig, parse_config
from tests.helpers.models import SHAPE, make_model, rope
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import Truth, make_adapter, make_samples, relative_error, run_reference
from tests.helpers.tiny_run import SurrogateLoss

MODELS = {
    "qwen3": {"family": "qwen3", "tied": False},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "llama": {"family": "llama", "tied": False},
    "qwen3-moe": {"family": "qwen3_moe", "tied": False},
    "mixtral": {"family": "mixtral", "tied": False},
    "llama-tied": {"family": "llama", "tied": True},
    "llama3": {"family": "llama", "tied": False, "rope_parameters": rope("llama3")},
    "qwen2-yarn": {"family": "qwen2", "tied": True, "rope_parameters": rope("yarn")},
    "llama-vocabulary": {"family": "llama", "tied": False},
    "qwen3-tied-vocabulary": {"family": "qwen3", "tied": True},
    "mistral": {"family": "mistral", "tied": False, "rope_parameters": rope("linear"), "sliding_window": 48, "seed": 1},
}
# Adapters that are not of all linear layers: keyword arguments of PEFT's LoraConfig.
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama-vocabulary": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "qwen3-tied-vocabulary": {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
}
# Models whose difference shows in these layouts already.
FEW_LAYOUTS = dict.fromkeys(("llama3", "qwen2-yarn", "mistral"), ("TP2+SP", "PP2"))
FEW_LAYOUTS |= {"qwen3-tied-vocabulary": ("TP1", "TP2+SP", "PP2", "TP2xPP2")}
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2+SP": {"tensor": 2},
    "TP2": {"tensor": 2, "sequence": False},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "PP2xDP2": {"pipeline": 2, "data": 2},
    "CP2": {"context": 2},
    "TP2+SPxCP2": {"tensor": 2, "context": 2},
    "PP2xCP2": {"pipeline": 2, "context": 2},
    "CP2xDP2": {"context": 2, "data": 2},
    "DP2+distributed": {"data": 2, "train": DISTRIBUTED},
    "DP2+overlap": {"data": 2, "train": OVERLAP},
    "TP2+SP+selective": {"tensor": 2, "train": {"recompute": "selective"}},
    "PP2+full": {"pipeline": 2, "train": {"recompute": "full"}},
    "CP2+all": {"context": 2, "train": OVERLAP | {"recompute": "full"}},
    "PP2xVPP2xDP2+all": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "train": OVERLAP | {"recompute": "full"}},
}
SWITCHED_MODELS = ("qwen3", "mixtral")  # at the layouts with a train section; test_switches.py is about the rest
EXPERTS = ("qwen3-moe", "mixtral")
TE = {"TE": {"backend": "te"}, "TE+TP2+SP": {"backend": "te", "tensor": 2}, "TE+PP2": {"backend": "te", "pipeline": 2}}
LAYOUTS |= TE
# Adam divides by the gradient's own size, so an element whose gradient is rounding noise moves by up to LR either way:
# the bound on single elements is meaningful only for an LR of training size; the update's norm is checked too.
STEPS, LR = 3, 5e-4


def parallel_of(layout: dict[str, Any]) -> ParallelConfig:
    """The ``parallel`` section of an entry of LAYOUTS; it may also have ``train`` and ``backend``."""
    return ParallelConfig(**{key: value for key, value in layout.items() if key not in ("train", "backend")})


def models_of(layout: dict[str, Any]) -> list[str]:
    """The models that run at a layout."""
    if "train" in layout:
        return list(SWITCHED_MODELS)
    dense = "backend" in layout or layout.get("sequence") is False
    few = {name: [LAYOUTS[key] for key in keys] for name, keys in FEW_LAYOUTS.items()}
    return [name for name in MODELS if not (dense and name in EXPERTS) and layout in few.get(name, [layout])]


def make_config(model: Path, layout: dict[str, Any]) -> RunConfig:
    """A run config for a tiny model; micro-batches of at most 64 tokens force several per step."""
    train = {"micro_batch_tokens": 64, "max_grad_norm": 1.0, "prompts_per_step": 4} | layout.get("train", {})
    return parse_config(
        {
            "model": {"path": str(model), "dtype": "float32", "backend": layout.get("backend", "local")},
            "task": {"name": "arithmetic"},
            "parallel": parallel_of(layout).model_dump(),
            "train": train,
            "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
        }
    )


def train_steps(model: Any, batch: Any, steps: int) -> dict:
    """Everything that is compared, of some updates on one batch."""
    result = {"logprobs": model.forward(batch), "base": model.forward(batch, adapter=False), "norms": []}
    for step in range(steps):
        metrics = model.forward_backward(batch, SurrogateLoss())
        if step == 0:
            result |= {"gradients": model.gradients(), "entropy": metrics["entropy"]}
        result["norms"].append(model.optim_step(LR)["grad_norm"])
    result["adapter"] = {n: t.cpu() for n, t in model.export_weights(adapter_only=True)}
    return result


def train_ranks(folder: str, layouts: list[str]) -> dict:
    """On each rank: every model at every layout of this world size."""
    from megatron.core.parallel_state import destroy_model_parallel

    from megarl.lora import apply_lora, load_peft_config
    from megarl.model.megatron_model import MegatronModel
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups

    device = pick_device("auto")
    results = {}
    for layout in layouts:
        destroy_model_parallel()
        groups = init_groups(parallel_of(LAYOUTS[layout]), device)
        for name in models_of(LAYOUTS[layout]):
            torch.manual_seed(0)
            root = Path(folder) / name
            config = make_config(root / "model", LAYOUTS[layout])
            peft_config = load_peft_config(root / "adapter")
            model = MegatronModel(config, groups, lambda c, hf, g, p=peft_config: apply_lora(c, p, hf, groups=g))
            model.load_adapter(root / "adapter")
            samples = make_samples(10, SHAPE["vocab_size"])
            weights = np.full(len(samples), 0.05)
            batch = model.pack(samples, weights)
            result = train_steps(model, batch, STEPS)
            result["weights"] = {n: t.cpu() for n, t in model.export_weights(adapter_only=False)}
            result["merged"] = {n: t.cpu() for n, t in model.export_merged()}
            results[f"{layout}/{name}"] = result
    destroy_groups()
    return results


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """Models, adapters and what Hugging Face + PEFT computes with them."""
    return make_truths(tmp_path_factory.mktemp("parity"))


def make_truths(folder: Path) -> tuple[Path, dict[str, Truth]]:
    """Write models and adapters to a folder, and compute the references."""
    truths = {}
    for name, spec in MODELS.items():
        model = make_model(folder / name / "model", **spec)
        adapter = make_adapter(model, folder / name / "adapter", **ADAPTERS.get(name, {}))
        samples = make_samples(10, SHAPE["vocab_size"])
        truths[name] = run_reference(model, adapter, samples, np.full(len(samples), 0.05), STEPS, LR)
    return folder, truths


@pytest.mark.parametrize(
    "layouts",
    [
        ["TP1"],
        ["TP2+SP", "TP2", "PP2", "PP2xVPP2", "DP2"],
        ["DP2+distributed", "DP2+overlap", "TP2+SP+selective", "PP2+full", "CP2", "CP2+all"],
        ["TP2xPP2", "PP2xDP2", "PP2xVPP2xDP2+all"],
        ["TP2+SPxCP2", "PP2xCP2", "CP2xDP2"],
    ],
    ids=str,
)
def test_logprobs_gradients_and_updates_equal_peft(truths, layouts):
    folder, expected = truths
    world = parallel_of(LAYOUTS[layouts[0]]).world_size
    rows = []
    for rank, results in enumerate(run_ranks(train_ranks, world, str(folder), layouts)):
        for key, result in results.items():
            truth = expected[key.split("/")[1]]
            rows += [(f"{key} rank {rank} {what}", error, bound) for what, error, bound in compare(result, truth)]
            compare_base_weights(folder / key.split("/")[1] / "model", result["weights"])
            compare_merged(result)
    failed = [row for row in rows if not row[1] <= row[2]]
    worst = max(rows, key=lambda row: row[1] / row[2])
    print(f"\n{layouts}: {len(rows)} comparisons, worst {worst[0]}: {worst[1]:.1e} of {worst[2]:.0e}")
    assert not failed, failed[:10]


def compare(result: dict, truth) -> list[tuple[str, float, float]]:
    """(what, relative error, bound) of everything that was computed."""
    rows = [("logprobs", _worst(result["logprobs"], truth.logprobs), 1e-5)]
    rows += [("base logprobs", _worst(result["base"], truth.base_logprobs), 1e-5)]
    assert result["gradients"].keys() == truth.gradients.keys()
    rows += [(f"grad {n}", relative_error(g, truth.gradients[n]), 1e-4) for n, g in result["gradients"].items()]
    assert result["adapter"].keys() == truth.adapter.keys()
    rows += [(f"adapter {n}", relative_error(t, truth.adapter[n]), 1e-4) for n, t in result["adapter"].items()]
    rows += [(f"update {n}", _update_error(t, truth, n), 2e-3) for n, t in result["adapter"].items()]
    rows += [("entropy", abs(result["entropy"] / truth.entropy - 1), 1e-5)]
    rows += [("norms", max(abs(a - b) / b for a, b in zip(result["norms"], truth.norms, strict=True)), 1e-4)]
    return rows


def _worst(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(relative_error(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(actual, expected, strict=True))


def compare_merged(result: dict) -> None:
    """Merged export is base + scaling * B @ A (alpha 8, rank 4), whatever the layout."""
    weights = result["weights"]
    if "base_model.model.lm_head.lora_A.weight" in result["adapter"]:
        weights = {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}  # untied by the merge
    assert result["merged"].keys() == weights.keys()
    for name, merged in result["merged"].items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weights[name]
        if f"{module}.lora_embedding_A" in result["adapter"]:
            a, b = (result["adapter"][f"{module}.lora_embedding_{side}"] for side in "AB")
            expected = expected + 2.0 * (b @ a).T
        if f"{module}.lora_A.weight" in result["adapter"]:
            a, b = (result["adapter"][f"{module}.lora_{side}.weight"] for side in "AB")
            expected = expected + 2.0 * (b @ a)
        assert relative_error(merged, expected) < 1e-6, name


def _update_error(tensor: torch.Tensor, truth, name: str) -> float:
    """Error of the three steps' update, by norm."""
    update = truth.adapter[name].double() - truth.start[name].double()
    return float((tensor.double() - truth.adapter[name].double()).norm() / update.norm())


def compare_base_weights(model: Path, weights: dict[str, torch.Tensor]) -> None:
    """Export gives back the file, bit for bit, after training: the base is immutable."""
    from safetensors.torch import load_file

    original = load_file(model / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
