# SPDX-License-Identifier: Apache-2.0
"""vLLM engines and how they sample."""

from typing import Any, Literal

from pydantic import Field

from megarl.config.base import Section


class EngineParallel(Section):
    """How one engine is spread over ranks; names as in the trainer's ``parallel`` section."""

    tensor: int = Field(1, ge=1, le=1024)
    """Tensor parallel size (TP)."""
    pipeline: Literal[1] = 1
    """Pipeline parallel size (PP). Must be 1: weights reach the ranks of one stage."""
    expert: Literal[1] = 1
    """Expert parallel size (EP). Must be 1: vLLM keeps adapters of all experts on every rank."""


class SamplerConfig(Section):
    engines: int = Field(1, ge=1, le=4096)
    """vLLM engines (data parallel copies of the model); prompts are spread over them."""
    parallel: EngineParallel = Field(default_factory=EngineParallel)
    """Of each engine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs`` (``{swap_space: 2}``), passed on as they are. Those that megarl
    sets itself are refused."""
    share_gpus: bool | None = None
    """Put engines on the trainer's GPUs, ``gpu_memory_utilization`` of each; at most one engine of
    ``parallel.tensor`` 1 per rank. Default: only where the trainer's ranks take all GPUs of the cluster."""
    samples_per_prompt: int = Field(8, ge=2, le=65_536)
    """Group size: completions per prompt (n)."""
    temperature: float = Field(1.0, ge=0.01)
    """Applied on both sides: the policy is softmax(logits / temperature). At least 0.01: vLLM samples at 0.01 where
    less is asked for, so that the trainer would compute another policy's logprobs."""
    top_p: float = 1.0
    """Must be 1: truncated distributions cannot be replayed in the trainer yet."""
    top_k: int = -1
    """Must be -1 (off), for the same reason."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are refused when the data is read."""
    max_response_tokens: int = Field(256, ge=1)
    """A completion that reaches it ends with ``finish_reason="length"``."""
    enforce_eager: bool | None = None
    """No CUDA graphs or compilation. Default: True on CPU, False on CUDA."""
    kv_cache_gib: float = Field(1.0, gt=0.0)
    """Memory for KV blocks of one engine."""
    gpu_memory_utilization: float = Field(0.4, gt=0.0, le=1.0)
    """Share of a GPU that vLLM may assume is free for one engine when it starts (CUDA only)."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences decoded at the same time in one engine."""
    generate_seconds: float = Field(3600.0, gt=0.0)
    """Limit of sampling one step's completions."""
    seed: int = Field(0, ge=0)
    """Base of the engines' seeds."""
