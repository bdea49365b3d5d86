# SPDX-License-Identifier: Apache-2.0
"""Check that megarl reads from vLLM's experts what vLLM wrote, tensor parallel too, and refuses what it cannot hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

layers = pytest.importorskip("vllm.lora.layers")

from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights  # noqa: E402

from megarl.checkpoint_engine import receiver_lora, receiver_moe, receiver_router  # noqa: E402
from megarl.errors import UnsupportedError  # noqa: E402

HIDDEN, INNER, EXPERTS, RANK, SLOT, LORA_ID = 12, 8, 3, 2, 1, 7
NAME = "model.layers.0.mlp.experts"
PARTS = [f"{NAME}.{expert}.{part}" for expert in range(EXPERTS) for part in ("gate_proj", "down_proj", "up_proj")]


def experts(tp_size: int = 1, tp_rank: int = 0, kind: str = "FusedMoEWithLoRA", **parallel: Any) -> Any:
    """Return vLLM's own module for one layer's experts, with its buffers but without a kernel."""
    module = getattr(layers, kind).__new__(getattr(layers, kind))
    torch.nn.Module.__init__(module)
    module.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        intermediate_size_per_partition=INNER // tp_size,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0, **parallel),
    )
    module.tp_size, module.tp_rank, module.device, module._w13_slices = tp_size, tp_rank, "cpu", 2
    module.base_layer = torch.nn.Module()
    module.base_layer.gate, module.base_layer._fse_fuse_gate = None, False
    if kind == "FusedMoEWithLoRA":
        lora = SimpleNamespace(
            max_lora_rank=4, max_loras=2, lora_dtype=torch.float32,
            fully_sharded_loras=False, enable_moe_shared_loras=False,
        )  # fmt: skip
        module.create_lora_weights(2, lora)
    return module


def manager(module: Any, **others: Any) -> Any:
    """Return a worker LoRA manager around it."""
    inner = SimpleNamespace(
        modules={NAME: module, **others}, packed_modules={NAME: PARTS}, lora_index_to_id=[None, LORA_ID]
    )
    return SimpleNamespace(_adapter_manager=inner)


def staged(module: Any) -> receiver_lora.StagedAdapter:
    """Return a random adapter of all experts, after vLLM has copied it into the module's buffers."""
    generator = torch.Generator().manual_seed(3)
    pairs = {
        part: receiver_lora.Pair(
            torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
        )
        for part, (inputs, outputs) in receiver_lora.linear_shapes(manager(module)).items()
    }
    packed = PackedLoRALayerWeights.pack_moe(
        [LoRALayerWeights(part, RANK, RANK, pairs[part].a, pairs[part].b) for part in PARTS], NAME
    )
    module.set_lora(SLOT, packed.lora_a, packed.lora_b)
    return receiver_lora.StagedAdapter(pairs, RANK)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_what_vllm_loaded_compares_bit_for_bit(size: int, rank: int) -> None:
    module = experts(size, rank)
    adapter = staged(module)
    assert adapter.pairs[PARTS[0]].b.shape == (INNER, RANK)
    assert receiver_lora.adapter_differences(manager(module), adapter, LORA_ID) == []


@pytest.mark.parametrize("buffer", ["w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"])
@pytest.mark.parametrize("entry", ["first", "last"])
def test_a_changed_element_is_found_by_name(buffer: str, entry: str) -> None:
    module = experts(2, 1)
    adapter = staged(module)
    matrices = getattr(module, f"{buffer}_stacked")[-1]
    matrices[SLOT, 2].view(-1)[0 if entry == "first" else -1] += 1
    part = "down_proj" if "w2" in buffer else "up_proj"
    assert receiver_lora.adapter_differences(manager(module), adapter, LORA_ID) == [f"{NAME}.2.{part}"]


def test_a_slot_that_is_switched_off_is_found() -> None:
    module = experts()
    adapter = staged(module)
    module.adapter_enabled[SLOT] = 0
    assert receiver_lora.adapter_differences(manager(module), adapter, LORA_ID) == [PARTS[0]]


def test_experts_without_an_adapter_must_hold_zeros() -> None:
    module = experts()
    nothing = receiver_lora.StagedAdapter({}, RANK)
    assert receiver_lora.adapter_differences(manager(module), nothing, LORA_ID) == []
    staged(module)
    assert set(receiver_lora.adapter_differences(manager(module), nothing, LORA_ID)) == set(PARTS)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (dict.fromkeys(PARTS[1:], 2), "not '.*experts.0.gate_proj'"),
        ({**dict.fromkeys(PARTS, 2), PARTS[4]: 3}, r"down projections .* ranks \[2, 3\]"),
    ],
)
def test_what_vllm_cannot_stack_is_refused(ranks: dict, message: str) -> None:
    inner = manager(experts())._adapter_manager
    receiver_moe.check_stackable(inner, {})
    receiver_moe.check_stackable(inner, {part: 3 if "down" in part else 2 for part in PARTS})
    with pytest.raises(UnsupportedError, match=message):
        receiver_moe.check_stackable(inner, ranks)


def test_engines_that_hold_experts_otherwise_are_refused() -> None:
    receiver_moe.check_engine(manager(experts())._adapter_manager)
    spread, repeated = experts(), experts()
    spread.moe_config.moe_parallel_config.use_ep = True
    repeated.moe_config.num_local_experts = EXPERTS + 1
    for module, message in (
        (spread, "expert-parallel engine"),
        (experts(kind="FusedMoE3DWithLoRA"), "are stacked in the model's files"),
        (repeated, "held more than once"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            receiver_moe.check_engine(manager(module)._adapter_manager)


def test_a_router_that_the_experts_call_themselves_is_called_with_its_adapter() -> None:
    router, module = torch.nn.Linear(HIDDEN, EXPERTS), experts()
    wrapper = layers.ReplicatedLinearWithLoRA.__new__(layers.ReplicatedLinearWithLoRA)
    torch.nn.Module.__init__(wrapper)
    wrapper.base_layer, module.base_layer.gate = router, router
    inner = manager(module, **{"model.layers.0.mlp.gate": wrapper})._adapter_manager
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.gate' without their adapters"):
        receiver_router.check_routers(inner, ["model.layers.0.mlp.gate"])
    receiver_router.check_routers(inner, PARTS)
    receiver_router.connect_routers(inner.modules.values())
    assert module.base_layer.gate is wrapper
    receiver_router.check_routers(inner, ["model.layers.0.mlp.gate"])
    module.base_layer._fse_fuse_gate = True
    with pytest.raises(UnsupportedError, match="without their adapters"):
        receiver_router.check_routers(inner, ["model.layers.0.mlp.gate"])


def test_base_names_and_shapes_are_those_of_the_checkpoint() -> None:
    inner = manager(experts(2, 1))._adapter_manager
    sizes = receiver_moe.base_shapes(inner)
    assert sizes[f"{NAME}.1.up_proj.weight"] == (INNER, HIDDEN) and sizes[f"{NAME}.1.down_proj.weight"] == (
        HIDDEN,
        INNER,
    )
    for plain, inside in ((True, ""), (False, ".base_layer")):
        names = receiver_moe.base_names(NAME, PARTS, plain)
        assert names[f"{NAME}.2.gate_proj.weight"] == f"{NAME}{inside}.2.gate_proj.weight"
