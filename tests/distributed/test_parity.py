# SPDX-License-Identifier: Apache-2.0
"""Promise 1: logprobs, LoRA gradients and the updated adapter equal one process of Hugging Face + PEFT, in fp32."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megarl.verify.cases import Case, Place
from megarl.verify.reference.reference_runs import make_truth, run_shared
from megarl.verify.run import verify_places
from tests.helpers.cases import FLOAT32_ROWS, check, make_case, place
from tests.helpers.models import rope

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": False},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen2-tied": {"family": "qwen2", "tied": True, "num_key_value_heads": 1},
    "llama": {"family": "llama", "tied": False},
    "llama-tied": {"family": "llama", "tied": True},
    "llama3": {"family": "llama", "tied": False, "rope_parameters": rope("llama3")},
    "qwen2-yarn": {"family": "qwen2", "tied": True, "rope_parameters": rope("yarn")},
    "mistral": {"family": "mistral", "tied": False, "rope_parameters": rope("linear"), "sliding_window": 11, "seed": 1},
    "llama-biases": {
        "family": "llama", "tied": False, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 5,
        "rope_parameters": rope("longrope"),
    },
    "qwen3-windows": {
        "family": "qwen3", "tied": True, "attention_bias": True, "sliding_window": 9, "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "rope_parameters": rope("dynamic"),
    },
    "llama-vocabulary": {"family": "llama", "tied": False},
    "qwen3-tied-vocabulary": {"family": "qwen3", "tied": True},
    "qwen2-patterns": {"family": "qwen2", "tied": False},
    "qwen3-moe": {"family": "qwen3_moe", "tied": False},
    "mixtral": {"family": "mixtral", "tied": False},
}  # fmt: skip
# Adapters that do not cover all linear layers: keyword arguments of PEFT's LoraConfig.
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama-vocabulary": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "qwen3-tied-vocabulary": {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    "qwen2-patterns": {
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 3, "o_proj": 1},
        "alpha_pattern": {"v_proj": 31, "layers.0.self_attn.o_proj": 1, "layers.3.mlp.down_proj": 5},
        "use_rslora": True,
    },
}
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2+SP": {"tensor": 2},
    "TP2": {"tensor": 2, "sequence": False},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "CP2": {"context": 2},
    "DP2": {"data": 2},
    "TP2+SPxETP2": {"tensor": 2, "expert_tensor": 2},
    "EP2xDP2": {"expert": 2, "data": 2},
    "TP2+SP+selective": {"tensor": 2, "train": {"recompute": "selective"}},
    "PP2+full": {"pipeline": 2, "train": {"recompute": "full"}},
    "CP2+all": {"context": 2, "train": OVERLAP | {"recompute": "full"}},
    "DP2+distributed": {"data": 2, "train": DISTRIBUTED},
    "DP2+overlap": {"data": 2, "train": OVERLAP},
    "DP2+all": {"data": 2, "train": OVERLAP | {"recompute": "full"}},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "TP2+SPxCP2": {"tensor": 2, "context": 2},
    "PP2xCP2": {"pipeline": 2, "context": 2},
    "PP2xDP2": {"pipeline": 2, "data": 2},
    "CP2xDP2": {"context": 2, "data": 2},
    "TP2+SPxEP2xETP2xDP2": {"tensor": 2, "expert": 2, "expert_tensor": 2, "data": 2},
    "TP2+SPxDP2+all": {"tensor": 2, "data": 2, "train": OVERLAP | {"recompute": "full"}},
    "EP2xDP4+all": {"expert": 2, "data": 4, "train": OVERLAP | {"recompute": "selective"}},
    "PP2xVPP2xDP2+all": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "train": OVERLAP | {"recompute": "full"}},
}
# Each has the name of the same layout on the other back end.
TE = [
    "TP1", "TP2+SP", "PP2", "CP2", "EP2xDP2", "TP2+SPxCP2", "TP2+SPxEP2xETP2xDP2", "TP2+SP+selective", "PP2+full",
    "CP2+all", "DP2+all",
]  # fmt: skip
LAYOUTS |= {f"TE+{name}": LAYOUTS[name] | {"backend": "te"} for name in TE}
LAUNCHES = [
    ["TP1"],
    ["TP2+SP", "TP2", "PP2", "PP2xVPP2"],
    ["CP2", "DP2", "EP2xDP2", "TP2+SPxETP2"],
    ["TP2+SP+selective", "PP2+full", "CP2+all", "DP2+distributed", "DP2+overlap"],
    ["TP2xPP2", "PP2xDP2", "PP2xVPP2xDP2+all", "TP2+SPxDP2+all", "EP2xDP4+all"],
    ["TP2+SPxCP2", "PP2xCP2", "CP2xDP2", "TP2+SPxEP2xETP2xDP2"],
]
# test_switches.py shows that the first compute the same bits as without; the axes of the others meet in the last.
LONG = LAUNCHES[3:5]
# These models have between them every kind of layer and of embedding, and run at every layout that fits them. The
# others run at the layouts that split their special features. `megarl verify --matrix` runs all products.
EVERYWHERE = ("qwen3", "llama-tied", "qwen3-moe")
ELSEWHERE = ("TP2+SP", "PP2")
ONLY: dict[str, tuple[str, ...]] = {"llama3": ("TP2+SP",), "qwen2-yarn": ("PP2",), "mistral": ("TP2+SP", "CP2")}
# Layers that the stages cannot share evenly; windows shorter than the sequences.
ONLY |= {"llama-biases": ("TP2+SP", "PP2", "PP2xVPP2"), "qwen3-windows": ("TP2+SPxCP2", "PP2+full")}
ONLY["qwen3-tied-vocabulary"] = (*ELSEWHERE, "TP2xPP2")
# Each KV head is on two ranks.
ONLY["qwen2-tied"] = (*ELSEWHERE, "TP2")
# lm_head's adapter is used outside its layer's forward pass, and the embedding's before any recomputed layer.
ONLY["llama-vocabulary"] = (*ELSEWHERE, "TP2", "CP2", "DP2", "DP2+overlap", "PP2+full")
SWITCHED = ("qwen3", "mixtral")  # at the layouts with a train section; test_switches.py is about the rest
WITH_EXPERTS = ("qwen3-moe", "mixtral")


def models_at(name: str) -> list[str]:
    """Return the models that run at a layout."""
    layout = LAYOUTS[name]
    if "expert" in layout or "expert_tensor" in layout:
        return list(WITH_EXPERTS)
    if "train" in layout:
        return [*SWITCHED, *(model for model, names in ONLY.items() if name in names)]
    met = [
        model for model in MODELS if model in EVERYWHERE or name in ONLY.get(model, ELSEWHERE) or "backend" in layout
    ]
    return [model for model in met if not (layout.get("sequence") is False and model in WITH_EXPERTS)]


def make_cases(folder: Path, names: Iterable[str] = MODELS) -> dict[str, Case]:
    """Make models and adapters, with the truth of each."""
    cases = {name: make_case(folder, name, adapter=ADAPTERS.get(name), **MODELS[name]) for name in names}
    run_shared(make_truth, list(cases.values()))
    return cases


def places_at(cases: dict[str, Case], layouts: list[str]) -> list[Place]:
    """Return every model of the cases at every layout that it runs at."""
    return [
        place(cases[model], layout, LAYOUTS[layout])
        for layout in layouts
        for model in models_at(layout)
        if model in cases
    ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return make_cases(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in LAUNCHES],
    ids=str,
)
def test_every_row_of_verify_keeps_its_fixed_bound(cases, layouts):
    reports = verify_places(places_at(cases, layouts))
    assert all([row.name for row in report.rows] == FLOAT32_ROWS for report in reports)
    check(reports)


def build_of_standins():
    """In each rank, make a norm and the linear behind it one module, as Transformer Engine does (by a stand-in)."""
    from megarl.model.layers import build
    from tests.helpers.te_standin import NormColumnStandIn, standin_block_spec

    def run_fused(model, *args, **kwargs):
        assert any(isinstance(module, NormColumnStandIn) for module in model.modules())
        return forward(model, *args, **kwargs)

    forward = build.PackedGPTModel.forward
    build.PackedGPTModel.forward = run_fused
    build.block_spec = lambda model: standin_block_spec


def test_adapters_behind_a_fused_norm_equal_peft(cases):
    places = [
        place(case, name, LAYOUTS[name])
        for name in ("TP2+SP", "TP2", "PP2", "CP2")
        for case in (cases[model] for model in ("qwen3", "qwen2-tied", "qwen3-moe"))
        if not (name == "TP2" and case.name in WITH_EXPERTS)  # needs SP
    ]
    reports = verify_places(places, prepare=build_of_standins)
    assert all([row.name for row in report.rows] == FLOAT32_ROWS for report in reports)
    check(reports)
