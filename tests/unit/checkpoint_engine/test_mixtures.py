# SPDX-License-Identifier: Apache-2.0
"""Check that megarl reads from vLLM's experts what vLLM wrote, tensor parallel too, and refuses what it cannot hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

layers = pytest.importorskip("vllm.lora.layers")

from peft import LoraConfig  # noqa: E402
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights  # noqa: E402

from megarl.checkpoint_engine.buckets.filling import view_of  # noqa: E402
from megarl.checkpoint_engine.buckets.stream import plan_of  # noqa: E402
from megarl.checkpoint_engine.receiver.adapters import adapter_plan  # noqa: E402
from megarl.checkpoint_engine.receiver.experts import mixtures, routers  # noqa: E402
from megarl.checkpoint_engine.receiver.writers.host import HostWrites  # noqa: E402
from megarl.errors import UnsupportedError, WeightSyncError  # noqa: E402
from megarl.peft.names import PREFIX  # noqa: E402

HIDDEN, INNER, EXPERTS, RANK, SLOT = 12, 8, 3, 2, 1
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
    inner = SimpleNamespace(modules={NAME: module, **others}, packed_modules={NAME: PARTS}, lora_slots=2, model=None)
    return SimpleNamespace(_adapter_manager=inner, lora_config=SimpleNamespace(max_lora_rank=4))


def adapter() -> dict[str, torch.Tensor]:
    """Return a random adapter of all experts, under PEFT's names."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for part, (inputs, outputs) in adapter_plan.linear_shapes(manager(experts())).items():
        tensors[f"{PREFIX}{part}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
        tensors[f"{PREFIX}{part}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    return tensors


def written(module: Any, tensors: dict[str, torch.Tensor], spoil: Any = None) -> adapter_plan.SlotPlan:
    """Write an adapter into the module's slot, from several buckets, over values of another one; alpha is 3 r."""
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=targets).to_dict() | {"target_modules": targets}
    plan = plan_of(tensors.items(), config, 512)
    slot_plan = adapter_plan.plan_slot(manager(module), plan)
    buffers = adapter_plan.buffers_of(manager(module), SLOT)
    for buffer in buffers:
        buffer.fill_(7)
    buckets = plan.places.buckets
    assert len(buckets) > 2
    targets = [*map(spoil, buffers)] if spoil else buffers
    for number, places in enumerate(buckets):
        payload = torch.zeros(places.end, dtype=torch.uint8)
        for place in places:
            view_of(payload, place).copy_(tensors[place.name])
        HostWrites(slot_plan.writes(number, targets)).run(payload)().refuse("adapter")
    return slot_plan


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_slot_gets_what_vllm_itself_would_have_written(size: int, rank: int) -> None:
    module, theirs = experts(size, rank), experts(size, rank)
    tensors = adapter()
    plan = written(module, tensors)
    layers = [
        LoRALayerWeights(part, RANK, RANK, *(tensors[f"{PREFIX}{part}.lora_{x}.weight"] for x in "AB"))
        for part in PARTS
    ]
    packed = PackedLoRALayerWeights.pack_moe(layers, NAME)
    theirs.set_lora(SLOT, packed.lora_a, [b * 3 for b in packed.lora_b])
    for name in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        for mine, other in zip(getattr(module, f"{name}_stacked"), getattr(theirs, f"{name}_stacked"), strict=True):
            assert other[SLOT].any() and torch.equal(mine[SLOT], other[SLOT]) and not mine[1 - SLOT].any()
    assert [(one is module, adapted) for one, adapted in plan.experts] == [(True, True)]


def test_a_value_that_is_not_finite_is_refused_by_name() -> None:
    tensors = adapter()
    tensors[f"{PREFIX}{PARTS[4]}.lora_B.weight"][3, 1] = float("inf")
    with pytest.raises(WeightSyncError, match=f"not finite in '{PARTS[4]}.lora_B'"):
        written(experts(), tensors)


@pytest.mark.parametrize("padding", [True, False])
def test_a_buffer_that_keeps_another_value_is_found_by_name(padding: bool) -> None:
    class Stuck(torch.Tensor):
        """Takes the matrix but keeps its padding, or the other way round."""

        def __setitem__(self, at: Any, value: Any) -> None:
            if torch.is_tensor(value) is padding:
                super().__setitem__(at, value)

    with pytest.raises(WeightSyncError, match=r"do not hold the adapter exactly in '.*lora_A'"):
        written(experts(2, 1), adapter(), spoil=lambda buffer: buffer.as_subclass(Stuck))


def test_a_copy_instead_of_a_cut_is_refused_by_name() -> None:
    module = experts(2, 0)
    module._slice_w2_a = lambda matrices: matrices.clone()
    with pytest.raises(UnsupportedError, match=r"does not cut '.*0\.down_proj\.lora_A'"):
        written(module, adapter())


def test_experts_are_switched_on_exactly_where_they_are_adapted() -> None:
    module = experts()
    for adapted in (True, False):
        mixtures.switch(module, SLOT, adapted)
        assert mixtures.is_switched(module, SLOT, adapted)
        assert not mixtures.is_switched(module, SLOT, not adapted)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (dict.fromkeys(PARTS[1:], 2), "not '.*experts.0.gate_proj'"),
        ({**dict.fromkeys(PARTS, 2), PARTS[4]: 3}, r"down projections .* ranks \[2, 3\]"),
    ],
)
def test_what_vllm_cannot_stack_is_refused(ranks: dict, message: str) -> None:
    inner = manager(experts())._adapter_manager
    mixtures.check_stackable(inner, {})
    mixtures.check_stackable(inner, {part: 3 if "down" in part else 2 for part in PARTS})
    with pytest.raises(UnsupportedError, match=message):
        mixtures.check_stackable(inner, ranks)


def test_engines_that_hold_experts_otherwise_are_refused() -> None:
    mixtures.check_engine(manager(experts())._adapter_manager)
    spread, repeated = experts(), experts()
    spread.moe_config.moe_parallel_config.use_ep = True
    repeated.moe_config.num_local_experts = EXPERTS + 1
    for module, message in (
        (spread, "expert-parallel engine"),
        (experts(kind="FusedMoE3DWithLoRA"), "are stacked in the model's files"),
        (repeated, "held more than once"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            mixtures.check_engine(manager(module)._adapter_manager)


def test_a_router_that_the_experts_call_themselves_is_called_with_its_adapter() -> None:
    router, module = torch.nn.Linear(HIDDEN, EXPERTS), experts()
    wrapper = layers.ReplicatedLinearWithLoRA.__new__(layers.ReplicatedLinearWithLoRA)
    torch.nn.Module.__init__(wrapper)
    wrapper.base_layer, module.base_layer.gate = router, router
    inner = manager(module, **{"model.layers.0.mlp.gate": wrapper})._adapter_manager
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.gate' without their adapters"):
        routers.check_routers(inner, ["model.layers.0.mlp.gate"])
    routers.check_routers(inner, PARTS)
    routers.connect_routers(inner.modules.values())
    assert module.base_layer.gate is wrapper
    routers.check_routers(inner, ["model.layers.0.mlp.gate"])
    module.base_layer._fse_fuse_gate = True
    with pytest.raises(UnsupportedError, match="without their adapters"):
        routers.check_routers(inner, ["model.layers.0.mlp.gate"])


def test_base_names_and_shapes_are_those_of_the_checkpoint() -> None:
    inner = manager(experts(2, 1))._adapter_manager
    sizes = mixtures.base_shapes(inner)
    assert sizes[f"{NAME}.1.up_proj.weight"] == (INNER, HIDDEN) and sizes[f"{NAME}.1.down_proj.weight"] == (
        HIDDEN,
        INNER,
    )
    for plain, inside in ((True, ""), (False, ".base_layer")):
        names = mixtures.base_names(NAME, PARTS, plain)
        assert names[f"{NAME}.2.gate_proj.weight"] == f"{NAME}{inside}.2.gate_proj.weight"
