# SPDX-License-Identifier: Apache-2.0
"""Damage a sync of the scenario ``llama``, one way at a time. ``sampler_faults`` has the refusals that must follow."""

from collections.abc import Callable

import torch

from megarl.checkpoint_engine.base import TRANSPORTS
from megarl.config import CheckpointEngineConfig
from tests.e2e.sampler_faults import FIRST
from tests.e2e.sampler_rig import Rig, prompts, raised


def change_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], list]:
    """Return an edit of the first tensor of the export."""
    return lambda named: [(name, change(tensor) if name == FIRST else tensor) for name, tensor in named]


FAULTS: dict[str, Callable[[list], list]] = {
    "missing_half": lambda named: [pair for pair in named if pair[0] != FIRST],
    "missing_module": lambda named: [pair for pair in named if "layers.0.self_attn.q_proj" not in pair[0]],
    "missing_slice": lambda named: [pair for pair in named if "layers.1.self_attn.k_proj" not in pair[0]],
    "unknown_module": lambda named: [
        *named,
        *((name.replace("layers.0", "layers.7"), tensor) for name, tensor in named if "layers.0" in name),
    ],
    "twice": lambda named: [*named, named[0]],
    "wrong_shape": change_first(lambda tensor: tensor[:, :-1].contiguous()),
    "wrong_rank": change_first(lambda tensor: tensor[:-1].contiguous()),
    "nan": change_first(lambda tensor: torch.full_like(tensor, torch.nan)),
    "integers": change_first(lambda tensor: tensor.to(torch.int32)),
    "nothing": lambda named: [],
}


def fault(rig: Rig, edit: Callable[[list], list]) -> list[str]:
    """Return what sync raises, and then generate and another sync."""
    rig.trainer.change(edit)
    outcome = [raised(lambda: rig.manager.sync(5, "adapter"))]
    rig.trainer.change(lambda named: named)
    outcome += [raised(lambda version=version: rig.generate(prompts(1), version)) for version in (4, 5)]
    outcome.append(raised(lambda: rig.manager.sync(6, "adapter")))
    rig.renew(base_ready=True)
    return outcome


def flipped_byte(rig: Rig) -> list[str]:
    """Change a byte during the transfer."""
    TRANSPORTS["flipping"] = "tests.e2e.faulty_transport"
    config = rig.config
    rig.config = config.model_copy(update={"checkpoint_engine": CheckpointEngineConfig(transport="flipping")})
    rig.renew()
    outcome = fault(rig, lambda named: named)
    rig.config = config
    rig.renew()
    return outcome
