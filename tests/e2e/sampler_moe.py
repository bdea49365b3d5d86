# SPDX-License-Identifier: Apache-2.0
"""A scenario of ``sampler_scenarios``: mixtures of experts in real engines."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.lora.files.peft_folder import config_dict, load_peft_config
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.reference.hf_peft import load_reference
from tests.e2e.sampler_faults import EXPERT
from tests.e2e.sampler_rig import VOCABULARY, PeftTrainer, Rig, prompts, raised, run_config
from tests.helpers.models import make_model

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "initializer_range": 0.05}


class FileTrainer(PeftTrainer):
    """Exports an adapter from disk, one expert at a time, as megarl does. The reference is PEFT with the same files."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder, self.adapter = family, folder, folder / "adapter"
        self.edit: Callable[[list], list] = lambda named: named
        self.pool = ThreadPoolExecutor(1)
        self.targets: list[str] | None = None  # targets of the exported config, if they differ from the true ones
        self.new_base(0)

    def new_base(self, seed: int) -> None:
        """Write other base weights into the same folder."""
        make_model(self.folder, self.family, tied=False, seed=seed, **SIZES)
        self.names = names_of(read_config(self.folder))
        vars(self).pop("model", None)

    def randomise(self, seed: int, targets: Any = "all-linear", parameters: Any = None) -> None:
        make_adapter(self.folder, self.adapter, seed=seed, target_modules=targets, target_parameters=parameters)
        vars(self).pop("model", None)

    @cached_property
    def model(self) -> torch.nn.Module:
        return load_reference(self.folder, self.adapter).eval()

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        file = self.adapter / "adapter_model.safetensors" if adapter_only else self.folder / "model.safetensors"
        yield from self.edit(list(load_file(file).items()))

    def export_adapter_config(self) -> dict[str, Any]:
        changed = {"target_modules": self.targets} if self.targets else {}
        return config_dict(load_peft_config(self.adapter), self.names) | changed

    def without_adapter(self, nested: list) -> float:
        """Return the largest distance of nested completions' logprobs from the base model's."""
        with self.model.disable_adapter():
            return max(
                float(np.abs(self.logprobs(one.prompt_ids, one.response_ids, 1.0) - one.logprobs).max())
                for group in nested
                for one in group
            )


def adapters(rig: Rig, router: str, experts: list[str]) -> dict[str, Any]:
    """Sync adapters of everything (twice), of the router, the experts, the attention alone, and PEFT's stacked ones."""
    results: dict[str, Any] = {"errors": {}, "effects": {}}
    parts = {
        "all": "all-linear",
        "again": "all-linear",
        "router": [router],
        "experts": experts,
        "attention": ["q_proj"],
    }
    # In the second, PEFT doubles the rank of gate and up. In the last, vLLM's experts lack one of two.
    stacked = {
        "stacked": (["q_proj"], ["gate_up_proj", "down_proj", "gate.weight"]),
        "doubled": (experts, ["gate.weight"]),
        "gate_up": ([], ["gate_up_proj"]),
    }
    for version, (part, targets) in enumerate({**parts, **stacked}.items(), 1):
        rig.trainer.randomise(version, *(targets if part in stacked else (targets,)))
        rig.manager.sync(version, "adapter")
        drawn = rig.generate(prompts(4, seed=version), version)
        results["errors"][part] = rig.error(drawn)
        results["effects"][part] = rig.trainer.without_adapter(drawn)
        if part == "again":
            rig.trainer.randomise(1)
            results["error_of_previous"] = rig.error(drawn)
    return results


def new_base(rig: Rig, version: int) -> dict[str, Any]:
    """Send other base weights into the running engine, and the same adapter on them."""
    rig.trainer.new_base(7)
    rig.trainer.randomise(version)
    rig.manager.sync(version, "base")
    rig.manager.sync(version, "adapter")
    drawn = rig.generate(prompts(4), version)
    rig.trainer.new_base(0)
    return {"error_of_old_base": rig.error(drawn)} | _with_new(rig, drawn)


def _with_new(rig: Rig, drawn: list) -> dict[str, Any]:
    rig.trainer.new_base(7)
    return {"error_of_new_base": rig.error(drawn)}


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], list]:
    """Return an edit of one tensor of the export."""
    return lambda named: [(key, how(tensor) if key == name else tensor) for key, tensor in named]


LORA_A, LORA_B = (f"base_model.model.{EXPERT}.lora_{side}.weight" for side in "AB")
FAULTS: dict[str, Callable[[list], list]] = {
    "missing_expert": lambda named: [pair for pair in named if EXPERT not in pair[0]],
    "missing_half": lambda named: [pair for pair in named if pair[0] != LORA_B],
    "extra_expert": lambda named: [
        *named,
        *((name.replace("experts.3", "experts.4"), tensor) for name, tensor in named if EXPERT in name),
    ],
    "wrong_shape": change(LORA_B, lambda tensor: tensor[:-1].contiguous()),
    "wrong_rank": change(LORA_A, lambda tensor: tensor[:-1].contiguous()),
    "nan": change(LORA_A, lambda tensor: torch.full_like(tensor, torch.nan)),
}
BASE_FAULTS: dict[str, Callable[[list], list]] = {
    "base_missing_expert": FAULTS["missing_expert"],
    "base_extra_expert": FAULTS["extra_expert"],
    "base_wrong_shape": change(f"{EXPERT}.weight", lambda tensor: tensor[:-1].contiguous()),
}


def refused(rig: Rig, edit: Callable[[list], list], kind: Any) -> str:
    """Return what sync raises for an edited export. Afterwards the rig can be used again."""
    rig.trainer.change(edit)
    outcome = raised(lambda: rig.manager.sync(18, kind))
    rig.trainer.change(lambda named: named)
    rig.call(rig.sampler.resident())
    rig.renew(base_ready=kind == "adapter")
    return outcome


def moe(folder: Path) -> dict[str, Any]:
    """Run two engines one after the other, which share this process's imports."""
    return {"qwen3_moe": qwen3_moe(folder / "qwen3_moe"), "mixtral": mixtral(folder / "mixtral")}


def qwen3_moe(folder: Path) -> dict[str, Any]:
    """Run Qwen3-MoE, whose experts call the router themselves."""
    trainer = FileTrainer("qwen3_moe", folder)
    rig = Rig(run_config(folder, lora={"r": 4}), trainer)
    try:
        rig.manager.sync(0, "base")
        loaded = adapters(rig, "gate", ["gate_proj", "up_proj", "down_proj"])
        trainer.randomise(18, ["gate_proj", "up_proj", "down_proj"])
        trainer.targets = ["gate_proj", "up_proj"]
        loaded["faults"] = {
            "part_of_experts": refused(rig, lambda named: [p for p in named if "down_proj" not in p[0]], "adapter")
        }
        trainer.targets = None
        trainer.randomise(18)
        loaded["faults"] |= {name: refused(rig, edit, "adapter") for name, edit in FAULTS.items()}
        loaded["faults"] |= {name: refused(rig, edit, "base") for name, edit in BASE_FAULTS.items()}
        return loaded | new_base(rig, 19)
    finally:
        rig.call(rig.sampler.close())


def mixtral(folder: Path) -> dict[str, Any]:
    """Run Mixtral: other names, and a router that the layer calls."""
    trainer = FileTrainer("mixtral", folder)
    rig = Rig(run_config(folder, lora={"r": 4}), trainer)
    try:
        rig.manager.sync(0, "base")
        return adapters(rig, "gate", ["w1", "w2", "w3"]) | new_base(rig, 19)
    finally:
        rig.call(rig.sampler.close())
