# SPDX-License-Identifier: Apache-2.0
"""Put LoRA on models that somebody else built: those that fit their config.json work; others are refused."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from peft import LoraConfig
from safetensors.torch import load_file

from megarl.errors import UnsupportedError
from megarl.lora import apply_lora
from megarl.lora.files.peft_folder import WEIGHTS
from megarl.lora.layers.state import adapters_of
from megarl.model.weights.base_tensors import load_base
from megarl.model.weights.hf_folder import read_config
from megarl.parallel.groups import Groups, current_groups
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.reference.hf_peft import load_reference
from tests.helpers.models import make_model
from tests.helpers.plugin_script import parsed, script
from tests.helpers.ranks import run_ranks

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
# A difference between a model and its config.json -> what the refusal names.
OTHERS = {
    "no gate": (["--swiglu"], [], "gated_linear_unit"),
    "fewer layers": ([], ["--num-layers", 2], "num_layers"),
    "other heads": ([], ["--num-attention-heads", 6, "--kv-channels", 8], "num_attention_heads"),
    "other KV heads": ([], ["--num-query-groups", 4], "num_query_groups"),
    "narrower MLP": ([], ["--ffn-hidden-size", 64], "ffn_hidden_size"),
    "other base of RoPE": ([], ["--rotary-base", 500000], "RoPE"),
    "other positions": ([], ["--position-embedding-type", "learned_absolute"], "position_embedding_type"),
    "other epsilon": ([], ["--norm-epsilon", 1e-6], "layernorm_epsilon"),
    "tied": (["--untie-embeddings-and-output-weights"], [], "share_embeddings_and_output_weights"),
    "small vocabulary": ([], ["--vocab-size", 120], "vocabulary"),
    "norms of queries": ([], ["--qk-layernorm"], "qk_layernorm"),
}


class Halved(torch.nn.Module):
    """Fake quantisation: weights on a coarse grid."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight * 16).round() / 16


def on_one_rank(model: str, adapter: str) -> dict[str, Any]:
    example = script()
    device = example.initialize(parsed(model, {}))
    hf, results = read_config(model), {}
    for name, (without, added, _) in OTHERS.items():
        args = parsed(model, {}, *added)
        for flag in without:
            setattr(args, flag.removeprefix("--").replace("-", "_"), False)
        results[name] = refusal(lambda args=args: apply_lora([example.model_provider(args, device)], lora(), hf))
    args = parsed(model, {})

    def fresh() -> torch.nn.Module:
        made = example.model_provider(args, device)
        load_base([made], model, hf)
        return made

    for when in ("before", "after"):
        one = fresh()
        with cast(one, when):
            adapted = apply_lora([one], lora(), hf)
        adapted.load(adapter)
        results[f"cast {when}"] = logits(one)
        adapted.save(Path(adapter).with_name(f"saved {when}"))
    results["padded"] = padded(example, model, adapter, device)
    results["KV heads"] = refusal(lambda: apply_lora([fresh()], lora(), hf, groups=of_ranks(4)))
    results["state"] = states(fresh, hf)
    results["no matrix"] = refusal(lambda: apply_lora([spoilt(fresh())], lora(), hf))
    quantised = fresh()
    linear = quantised.decoder.layers[0].mlp.linear_fc2
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved())
    adapted = apply_lora([quantised], lora(), hf)
    adapted.load(adapter)
    results["parametrised"] = logits(quantised)
    results["parametrised base"] = refusal(lambda: load_base([quantised], model, hf))
    dist.destroy_process_group()
    return results


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except UnsupportedError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def cast(model: torch.nn.Module, when: str) -> Iterator[None]:
    if when == "before":
        model.bfloat16()
    yield
    if when == "after":
        model.bfloat16()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return logits ``[1, 24, 132]``."""
    tokens = torch.arange(24)[None] * 5 % 131
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(24)[None], mask).float()


def padded(example: Any, model: str, adapter: str, device: torch.device) -> torch.Tensor:
    """Return the logits of a model whose vocabulary mcore has padded to 135 rows, and save its adapter."""
    args = parsed(model, {}, "--make-vocab-size-divisible-by", 5)
    one = example.model_provider(args, device)
    load_base([one], model, read_config(model))
    adapted = apply_lora([one], lora(), read_config(model))
    adapted.load(adapter)
    adapted.save(Path(adapter).with_name("saved padded"))
    return logits(one)


def of_ranks(tensor: int) -> Groups:
    """Return this rank as it would be in a larger tensor-parallel group."""
    groups = current_groups()
    return dataclasses.replace(groups, topology=dataclasses.replace(groups.topology, tensor=tensor))


def spoilt(model: torch.nn.Module) -> torch.nn.Module:
    """Return a linear that keeps integers and scales instead of its weight."""
    linear = model.decoder.layers[1].self_attention.linear_proj
    linear.integers = linear.weight.data.mul(16).round().to(torch.int8)
    del linear.weight
    return model


def states(fresh: Callable[[], torch.nn.Module], hf: dict) -> dict[str, Any]:
    """Return the base's and an adapted model's state dicts, to be compared."""
    plain, adapted = fresh(), fresh()
    before = plain.state_dict()
    lora_parts = apply_lora([adapted], lora(), hf)
    both = adapted.state_dict()
    adapters = adapters_of(both)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(1.0)
    moved = {name: tensor.clone() for name, tensor in adapted.state_dict().items() if tensor is not None}
    adapted.load_state_dict(before)
    after = adapted.state_dict()
    partly = before | dict(list(adapters.items())[1:])
    try:
        adapted.load_state_dict(partly)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    with lora_parts.without_adapters():
        left_out = list(adapted.state_dict()), list(adapted.sharded_state_dict())
    return {
        "names": (list(before), [name for name in both if name not in adapters], *left_out),
        "sharded": (list(plain.sharded_state_dict()), set(adapted.sharded_state_dict()), set(both)),
        "base": all(torch.equal(after[name], tensor) for name, tensor in before.items() if tensor is not None),
        "kept": all(torch.equal(after[name], moved[name]) for name in adapters),
        "refused": refused,
        "first": next(iter(adapters)),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    model = make_model(folder / "model", "llama", tied=False, vocab_size=132)
    adapter = make_adapter(model, folder / "adapter", target_modules=TARGETS)
    return folder, run_ranks(on_one_rank, 1, str(model), str(adapter))[0]


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_not_the_configs_is_refused_by_name(ran, name):
    assert f"the model's {OTHERS[name][2]}" in ran[1][name]


def reference(folder: Path, adapter: Path, change: Callable[[Any], None] = lambda model: None) -> torch.Tensor:
    peft = load_reference(folder / "model", adapter, torch.float64)
    change(peft)
    with torch.no_grad():
        return peft(input_ids=torch.arange(24)[None] * 5 % 131).logits


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_cast_to_bf16_computes_and_saves(ran, when):
    folder, results = ran
    exact = reference(folder, folder / "adapter")
    assert relative_error(results[f"cast {when}"], exact) < 2e-2
    assert relative_error(reference(folder, folder / f"saved {when}"), exact) < 2e-2


def test_a_padded_vocabulary_is_cut_when_the_adapter_is_saved(ran):
    folder, results = ran
    assert results["padded"].shape[-1] == 135
    exact = reference(folder, folder / "adapter")
    assert relative_error(results["padded"][..., :132], exact) < 1e-5
    shapes = {name: tensor.shape for name, tensor in load_file(folder / "saved padded" / WEIGHTS).items()}
    assert shapes["base_model.model.lm_head.lora_B.weight"] == (132, 4)
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_A"] == (4, 132)
    assert torch.equal(reference(folder, folder / "saved padded"), exact)


def test_a_kv_head_shared_by_ranks_as_mcore_shares_it_is_refused_by_name(ran):
    assert "the tensor-parallel size is 4, but the model has 2 KV heads; supported are" in ran[1]["KV heads"]


def test_fake_quantised_weights_are_adapted_as_peft_adapts_them(ran):
    folder, results = ran

    def quantise(peft: Any) -> None:
        weight = peft.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
        weight.data = Halved()(weight.data)

    exact = reference(folder, folder / "adapter", quantise)
    assert relative_error(results["parametrised"], exact) < 1e-5
    assert relative_error(reference(folder, folder / "adapter"), exact) > 1e-4
    assert "whose weight is computed" in results["parametrised base"]


def test_a_linear_without_a_weight_is_refused_by_name(ran):
    assert "model.layers.1.self_attn.o_proj is a RowParallelLinear whose weight is absent" in ran[1]["no matrix"]


def test_state_dicts_keep_the_bases_names(ran):
    state = ran[1]["state"]
    before, beside, left_out, left_out_sharded = state["names"]
    assert before == beside == left_out
    plain, sharded, both = state["sharded"]
    assert plain == left_out_sharded
    assert set(plain) <= sharded
    assert sharded == {name for name in both if not name.endswith("_extra_state") or name in plain}
    assert state["base"] and state["kept"]
    assert state["first"] in state["refused"] and "base_layer" not in state["refused"]


class GroupedMLP(torch.nn.Module):
    """Like mcore's, which a CPU host cannot build: all experts in two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = torch.nn.Parameter(torch.zeros(48, 4 * 2 * 24))
        self.weight2 = torch.nn.Parameter(torch.zeros(4 * 24, 48))


def grouped(model: str) -> tuple[str, bool]:
    """Put LoRA on experts in one matrix, and on the attention beside them."""
    example, hf = script(), read_config(model)
    args = parsed(model, {}, "--kv-channels", 16, "--qk-layernorm")
    device = example.initialize(args)

    def build() -> torch.nn.Module:
        config = example.core_transformer_config_from_args(args, device)
        for field, value in {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}.items():
            setattr(config, field, value)
        config.moe_router_load_balancing_type = "none"
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=4, qk_layernorm=True)
        made = example.GPTModel(config, spec, vocab_size=136, max_sequence_length=256, position_embedding_type="rope",
                                share_embeddings_and_output_weights=False)  # fmt: skip
        for layer in made.decoder.layers:
            layer.mlp.experts = GroupedMLP()
        return made

    refused = refusal(
        lambda: apply_lora([build()], LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"]), hf)
    )
    adapter = apply_lora([build()], LoraConfig(target_modules=["q_proj"]), hf)
    dist.destroy_process_group()
    return refused, len(adapter.parameters()) == 8


def test_grouped_experts_are_refused_by_name_and_the_attention_beside_them_is_adapted(tmp_path):
    model = make_model(tmp_path / "model", "qwen3_moe", tied=False)
    [(refused, adapted)] = run_ranks(grouped, 1, str(model))
    assert "mlp.experts is mcore's GroupedMLP; build it with moe_grouped_gemm=False" in refused
    assert adapted
