# SPDX-License-Identifier: Apache-2.0
"""Define the settings of `megarl bench sync`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megarl.bench.settings import Measured, model_config, parse
from megarl.config.checks import check_engine_fits_model
from megarl.config.sections.sampler import EngineParallel


class SyncBenchSettings(Measured):
    """The settings of `bench sync`."""

    contents: list[Literal["adapter", "merged"]] = Field(["adapter", "merged"], min_length=1)
    """What a sync sends; each is measured with engines of its own. The base that comes first is measured too."""
    transport: str = "auto"
    """``checkpoint_engine.transport``."""
    data: int = Field(1, ge=1)
    """``parallel.data``: ranks of the trainer, on the first GPUs. Each has the whole model."""
    engines: int = Field(1, ge=1)
    """Number of engines. Each gets GPUs of its own if there are enough: beside the trainer's, or with the trainer's
    among them. Otherwise several engines share each GPU."""
    tensor: int = Field(1, ge=1)
    """``sampler.parallel.tensor``: ranks, and GPUs, of each engine."""
    r: int = Field(32, ge=1)
    """Rank of the adapter, on all linears."""
    rounds: int = Field(20, ge=2)
    """Timed syncs of each kind; their median is reported."""
    bucket_mib: int = Field(512, ge=1)
    """``checkpoint_engine.bucket_mib``."""
    kv_cache_gib: float = Field(2.0, gt=0.0)
    """``sampler.kv_cache_gib``."""
    choose: bool = False
    """Also measure what each content costs while sampling, and say which pays. vLLM then compiles the engines."""
    concurrency: int = Field(256, ge=8, multiple_of=8)
    """With ``choose``: completions that each engine is asked for at once, 8 of each prompt."""
    response_tokens: int = Field(128, ge=1)
    """With ``choose``: tokens of a completion."""
    peers: bool = True
    """Measure the peers too: vLLM's own way (save the adapter to memory-backed files, load them into a running engine),
    and, where the package checkpoint-engine is installed and there is a GPU, its update of all weights. Not measured if
    the trainer has several ranks."""


def parse_sync_settings(model: str, overrides: Sequence[str] = ()) -> SyncBenchSettings:
    """Parse the settings of `bench sync`; arguments and errors as ``settings.parse``."""
    settings = parse(SyncBenchSettings, model, {}, overrides)
    check_engine_fits_model(EngineParallel(tensor=settings.tensor), model_config(settings.model, settings.layers))
    return settings
