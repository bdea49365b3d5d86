# SPDX-License-Identifier: Apache-2.0
"""The scenario ``shared`` of ``sampler_scenarios``: engines that read the base in the trainer's memory.

Memory of the host stands for that of the GPU.
"""

import os
import re
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megarl.checkpoint_engine import loan
from tests.e2e.plain_layout import PLAIN
from tests.e2e.sampler_moe import FileTrainer, change
from tests.e2e.sampler_rig import Rig, prompts, raised, run_config

# What megarl's trainer holds in one piece: gate and up of a linear, all experts of a layer.
PIECES = (r"(.*\.experts)\.\d+\.(?:gate|up)_proj", r"(.*\.experts)\.\d+\.(down)_proj", r"(.*\.mlp)\.(?:gate|up)_proj")
DOWN = "model.layers.1.mlp.down_proj.weight"


class LendingTrainer(FileTrainer):
    """Holds the base as megarl's trainer does, and lends it."""

    def hold(self) -> None:
        """Read the base from disk into shared memory."""
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.base = dict(in_pieces(load_file(self.folder / "model.safetensors")))

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().export_weights(True) if adapter_only else self.edit(list(self.base.items()))

    def lend_base(self) -> bytes:
        return loan.lend(self.base.items(), "cpu").to_bytes()


def in_pieces(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as views of the pieces of memory that they lie in together."""
    pieces: dict[str, list[str]] = {}
    for name in tensors:
        found = next((match for pattern in PIECES if (match := re.match(pattern, name))), None)
        pieces.setdefault("/".join(found.groups()) if found else name, []).append(name)
    for names in pieces.values():
        names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])
        whole = torch.cat([tensors[name].flatten() for name in names])
        parts = whole.split([tensors[name].numel() for name in names])
        yield from ((name, part.view_as(tensors[name])) for name, part in zip(names, parts, strict=True))


def shared(folder: Path) -> dict[str, Any]:
    """Run an engine of a dense model, and one of a mixture."""
    os.environ[PLAIN] = "1"
    loan.exported = lambda whole: bytes(ForkingPickler.dumps(whole))
    return {family: of_family(folder / family, family) for family in ("qwen3", "qwen3_moe")}


def of_family(folder: Path, family: str) -> dict[str, Any]:
    """Sync base and adapters, then damaged bases; at last change the base in the trainer's memory."""
    trainer = LendingTrainer(family, folder)
    trainer.hold()
    before = {name: tensor.clone() for name, tensor in trainer.base.items()}
    section = {"transport": "ipc", "timeout_seconds": 60.0}
    sampler = {"share_gpus": True, "share_base": True}
    config = run_config(folder, lora={"r": 4}, sampler=sampler, checkpoint_engine=section)
    rig = Rig(config, trainer, trainer.lend_base())
    try:
        results: dict[str, Any] = {"borrowed": rig.call(rig.sampler.borrowed())[0], "errors": []}
        rig.manager.sync(0, "base")
        for version in (1, 2):
            trainer.randomise(version)
            rig.manager.sync(version, "adapter")
            results["errors"].append(rig.error(rig.generate(prompts(4), version)))
        experts = next((name for name in before if "experts.3.up_proj" in name), DOWN)
        results["faults"] = {}
        for name, how in {"other": lambda tensor: tensor + 1, "nan": lambda tensor: tensor * torch.nan}.items():
            trainer.edit = change(experts, how)
            results["faults"][name] = raised(lambda: rig.manager.sync(2, "base"))
            trainer.edit = lambda named: named
            rig.renew(base_ready=False)
        results["unchanged"] = all(torch.equal(tensor, trainer.base[name]) for name, tensor in before.items())
        rig.manager.sync(2, "base")
        rig.manager.sync(2, "adapter")
        results["errors"].append(rig.error(rig.generate(prompts(4), 2)))
        # Nobody may do so. It shows that the engine reads this memory.
        for name in before:
            if re.search("down_proj|o_proj", name):
                trainer.base[name].mul_(2)
        drawn = rig.generate(prompts(4, seed=1), 2)
        results["error_of_old_base"] = rig.error(drawn)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if re.search(r"down_proj|o_proj", name) and "lora_" not in name:
                    parameter.mul_(2)
        results["error_of_new_base"] = rig.error(drawn)
        return results
    finally:
        rig.call(rig.sampler.close())
