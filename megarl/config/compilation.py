# SPDX-License-Identifier: Apache-2.0
"""Refuse what ``train.compile`` does not compile."""

from megarl.config.trainer import TrainerConfig
from megarl.errors import UnsupportedError


def check_compile(config: TrainerConfig) -> None:
    """Check the settings that ``train.compile`` depends on. ``back_ends`` refuses it with ``transformers``.

    Raises:
        UnsupportedError: the back end does not fit; the message names it.
    """
    if not config.train.compile:
        return
    if config.model.backend == "te":
        raise UnsupportedError(
            "train.compile is true with model.backend 'te', whose layers torch.compile cannot trace; use "
            "model.backend=local or train.compile=false"
        )
