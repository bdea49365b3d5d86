# SPDX-License-Identifier: Apache-2.0
"""How weights travel from trainer to sampler."""

from typing import Literal

from pydantic import Field

from megarl.config.base import Section


class CheckpointEngineConfig(Section):
    transport: str = "auto"
    """A registered transport, or ``file.py:Name``: an object with ``open_sender`` and ``open_receiver`` (see
    ``megarl.checkpoint_engine.base``); the path is relative to the recipe. ``shm``: shared memory, for samplers on the
    trainer's host. ``gloo``: TCP, between hosts. ``auto``: ``shm`` where trainer rank 0 and all engines share a node,
    else ``gloo``."""
    bucket_mib: int = Field(256, ge=1)
    """Tensors travel in buckets of at most this size (a larger tensor has a bucket of its own)."""
    timeout_seconds: float = Field(300.0, gt=0.0)
    """A sync that takes longer fails, and the run with it."""
    base_weights: Literal["send", "disk"] = "send"
    """At the start and on resume: ``send`` the trainer's base weights to the sampler, or let vLLM read them from
    ``model.path``."""
