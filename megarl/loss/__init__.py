# SPDX-License-Identifier: Apache-2.0
"""Register policy losses. A new loss is a module and a line in ``LOSSES``."""

from collections.abc import Mapping
from typing import Any

from megarl.config import LossConfig
from megarl.config.load import parse_section
from megarl.loss.advantages import group_advantages
from megarl.loss.aggregation import sequence_weights
from megarl.loss.base import Loss, LossFactory, LossOutput, TokenBatch
from megarl.loss.cispo import CispoLoss
from megarl.loss.grpo import GrpoLoss
from megarl.loss.gspo import GspoLoss
from megarl.loss.logprobs import token_logprobs
from megarl.loss.nll import NllLoss
from megarl.plugins import pick_or_load

__all__ = [
    "LOSSES",
    "Loss",
    "LossOutput",
    "NllLoss",
    "TokenBatch",
    "build_loss",
    "group_advantages",
    "sequence_weights",
    "token_logprobs",
]

# Name in ``loss.name`` -> factory.
LOSSES: dict[str, LossFactory] = {
    "cispo": CispoLoss,
    "grpo": GrpoLoss,
    "gspo": GspoLoss,
}


def build_loss(config: LossConfig | Mapping[str, Any] | None = None) -> Loss:
    """Build the loss that ``loss.name`` names: a registered one, or ``file.py:Name``. It is called with the section.

    Args:
        config: the ``loss`` section; None: its defaults.

    Raises:
        ConfigError: a wrong setting, or no such loss; the message lists the registered names.
    """
    config = parse_section(LossConfig, "loss", config)
    return pick_or_load(LOSSES, config.name, "loss", "loss.name")(config)
