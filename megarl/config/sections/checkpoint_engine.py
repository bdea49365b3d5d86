# SPDX-License-Identifier: Apache-2.0
"""Config section ``checkpoint_engine``: the transport of weights from trainer to sampler."""

from typing import Literal

from pydantic import Field

from megarl.config.base import Section


class CheckpointEngineConfig(Section):
    content: Literal["adapter", "merged"] = "adapter"
    """Weights that a sync sends. ``adapter``: A and B, which vLLM applies beside the base. ``merged``: base plus
    adapter, added in float32 and rounded once to ``model.dtype``, into a vLLM without LoRA, which decodes faster; only
    the attention and MLP blocks that the adapter changes are sent. Where the dtype is bfloat16, the rounding adds to
    the mismatch between sampler and trainer."""
    transport: str = "auto"
    """A registered transport, or ``file.py:Name`` for an object with ``open_sender`` and ``open_receiver`` (see
    ``megarl.checkpoint_engine.base``); the path is relative to the recipe. ``shm``: shared memory, if the samplers are
    on the trainer's host. ``gloo``: TCP, between hosts. ``ipc``: the sender's own memory, if every engine shares its
    GPUs with trainer ranks, which then send to it, or if trainer rank 0 and all engines compute on GPUs of one host, or
    on CPUs of one host. ``nccl``: between GPUs, each of one participant. ``hccl``: between Ascend NPUs. ``auto``:
    ``ipc`` if every engine shares its GPUs with trainer ranks; ``nccl`` if trainer rank 0 and every rank of an engine
    have a GPU of their own; ``ipc`` if they share some GPUs of one host, or compute on its CPUs; ``shm`` if they share
    a host otherwise; else ``gloo``."""
    bucket_mib: int = Field(512, ge=1)
    """Tensors travel in buckets of at most this size, MiB. A trainer rank that sends holds two, and so does every
    engine's rank that is not on its GPU. A larger tensor is divided into runs of rows; of an adapter it has a bucket of
    its own."""
    timeout_seconds: float = Field(300.0, gt=0.0)
    """Limit of one sync, seconds. A sync that takes longer ends the run."""
    base_weights: Literal["send", "disk"] = "send"
    """Source of the sampler's base weights at the start and on resume. ``send``: the trainer sends them; ``disk``: vLLM
    reads them from ``model.path``."""
    in_flight: Literal["drain", "overlap", "abort", "continue"] = "drain"
    """What becomes of requests that run when a new version has arrived in the engine. ``drain``: they end under the
    old version, and new requests wait for that; if it takes longer than half of ``timeout_seconds``, the run ends.
    ``overlap``: they end under the old version, and new requests begin under the new one at once. An engine then holds
    three versions, and a sync waits as long while all three have requests. Needs ``content`` adapter.
    ``abort``: what they have drawn is dropped, and they start again under the new version. ``continue``: they keep
    their tokens and go on under the new version, which computes the KV of the tokens so far anew;
    ``Completion.versions`` tells the version of each token. Nothing runs during a sync unless training is
    asynchronous (``train.max_staleness``)."""
    canary: bool = True
    """After every sync, compare trainer and engines on the first tokens of a prompt: they must agree, and what the
    engines compute must change when the adapter did. ``seconds/canary`` in the metrics is its cost."""
