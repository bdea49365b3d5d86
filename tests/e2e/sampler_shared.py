# SPDX-License-Identifier: Apache-2.0
"""The scenario ``shared`` of ``sampler_scenarios``: engines that read the base in the trainer's memory.

Memory of the host stands for that of the GPU. The engines compare by the GPU's kernels, interpreted.
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
from tests.e2e.plain_layout import INTERPRET, PLAIN
from tests.e2e.sampler_moe import FileTrainer, change
from tests.e2e.sampler_rig import Rig, prompts, raised, run_config

# What megarl's trainer holds in one piece: gate and up of a linear, all experts of a layer.
PIECES = [r"(.*\.experts)\.\d+\.(?:gate|up)_proj", r"(.*\.experts)\.\d+\.(down)_proj", r"(.*\.mlp)\.(?:gate|up)_proj"]
# And q, k and v on a rank with one KV head.
HEADS = r"(.*\.self_attn)\.[qkv]_proj"
# What tensor parallel ranks hold rows and columns of.
ROWS, COLUMNS = r"(q|k|v|gate|up)_proj|embed_tokens|lm_head", r"(o|down)_proj"
DOWN = "model.layers.1.mlp.down_proj.weight"
# Of the dense model.
KV_HEADS = 2


class LendingTrainer(FileTrainer):
    """Holds the base as megarl's ranks of one tensor parallel group do, and lends it."""

    def hold(self, ranks: int) -> None:
        """Read the base from disk into shared memory."""
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.ranks, whole = ranks, load_file(self.folder / "model.safetensors")
        self.base = [dict(in_pieces(part_of(whole, rank, ranks), ranks)) for rank in range(ranks)]

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every base tensor, whole."""
        for name, first in self.base[0].items():
            dim = dim_of(name)
            one = self.ranks == 1 or dim is None
            yield name, first if one else torch.cat([base[name] for base in self.base], dim)

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().export_weights(True) if adapter_only else self.edit(list(self.whole()))

    def held(self, rank: int) -> Iterator[loan.Held]:
        """Yield what a rank holds."""
        for name, tensor in self.base[rank].items():
            dim, shape, part = dim_of(name), list(tensor.shape), [slice(None)] * tensor.ndim
            if dim is not None:
                part[dim] = slice(rank * shape[dim], (rank + 1) * shape[dim])
                shape[dim] *= self.ranks
            yield loan.Held(name, tuple(shape), tuple(part), tensor)

    def lend_base(self) -> bytes:
        return loan.joined([loan.lend(self.held(rank), "cpu").to_bytes() for rank in range(self.ranks)])


def dim_of(name: str) -> int | None:
    """Return the dimension of a tensor that is divided among ranks."""
    return 0 if re.search(ROWS, name) else 1 if re.search(COLUMNS, name) else None


def part_of(tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of tensors."""
    dims = {name: dim_of(name) for name in tensors}
    return {name: one if dims[name] is None else one.chunk(ranks, dims[name])[rank] for name, one in tensors.items()}


def in_pieces(tensors: dict[str, torch.Tensor], ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as views of the pieces of memory that they lie in together."""
    pieces: dict[str, list[str]] = {}
    patterns = [*PIECES, HEADS] if ranks == KV_HEADS else PIECES
    for name in tensors:
        found = next((match for pattern in patterns if (match := re.match(pattern, name))), None)
        pieces.setdefault("/".join(found.groups()) if found else name, []).append(name)
    for names in pieces.values():
        names.sort(key=in_order)
        whole = torch.cat([tensors[name].flatten() for name in names])
        parts = whole.split([tensors[name].numel() for name in names])
        yield from ((name, part.view_as(tensors[name])) for name, part in zip(names, parts, strict=True))


def in_order(name: str) -> list[int | str]:
    """Sort by experts' numbers, gate before up, and q before k before v."""
    return [int(part) if part.isdigit() else part.replace("q_", "a_") for part in name.split(".")]


def shared(folder: Path) -> dict[str, Any]:
    """Run an engine of a dense model, one of a mixture, and one of a dense model on two ranks."""
    os.environ |= {PLAIN: "1", INTERPRET: "1"}
    loan.exported = lambda whole: bytes(ForkingPickler.dumps(whole))
    found = {family: of_family(folder / family, family) for family in ("qwen3", "qwen3_moe")}
    return found | {"two ranks": of_family(folder / "two", "qwen3", KV_HEADS)}


def of_family(folder: Path, family: str, ranks: int = 1) -> dict[str, Any]:
    """Sync base and adapters, then damaged bases; at last change the base in the trainer's memory."""
    trainer = LendingTrainer(family, folder)
    trainer.hold(ranks)
    before = {name: tensor.clone() for name, tensor in trainer.whole()}
    section = {"transport": "ipc", "timeout_seconds": 60.0}
    layout = {"tensor": ranks}
    sampler = {"share_gpus": True, "share_base": True, "parallel": layout}
    config = run_config(folder, lora={"r": 4}, sampler=sampler, parallel=layout, checkpoint_engine=section)
    rig = Rig(config, trainer, trainer.lend_base())
    rig.receivers = ranks
    try:
        results: dict[str, Any] = {"borrowed": rig.call(rig.sampler.borrowed()), "errors": []}
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
        results["unchanged"] = all(torch.equal(tensor, before[name]) for name, tensor in trainer.whole())
        rig.manager.sync(2, "base")
        rig.manager.sync(2, "adapter")
        results["errors"].append(rig.error(rig.generate(prompts(4), 2)))
        # Nobody may do so. It shows that the engine reads this memory.
        for name in before:
            if re.search("down_proj|o_proj", name):
                for base in trainer.base:
                    base[name].mul_(2)
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
