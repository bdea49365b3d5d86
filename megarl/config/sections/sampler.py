# SPDX-License-Identifier: Apache-2.0
"""Config section ``sampler``: vLLM engines and their sampling settings."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.base import Section


class EngineParallel(Section):
    """The layout of one engine over ranks; names as in the trainer's ``parallel`` section."""

    tensor: int = Field(1, ge=1, le=1024)
    """Tensor parallel size (TP)."""
    pipeline: Literal[1] = 1
    """Pipeline parallel size (PP). Must be 1: a sync delivers weights to the ranks of one stage."""
    expert: Literal[1] = 1
    """Expert parallel size (EP). Must be 1: vLLM keeps the adapters of all experts on every rank."""


class SamplerConfig(Section):
    engines: int = Field(1, ge=1, le=4096)
    """Number of vLLM engines (data parallel copies of the model). Prompts are spread over them."""
    parallel: EngineParallel = Field(default_factory=EngineParallel)
    """Layout of each engine."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs`` (``{swap_space: 2}``), passed on unchanged. Arguments that megarl
    sets itself are refused."""
    share_gpus: bool | None = None
    """Put engines on the trainer's GPUs, where each takes ``gpu_memory_utilization`` of every GPU that it uses. An
    engine of ``parallel.tensor`` n uses those of n ranks of one node, and no other engine does. Default: only if the
    trainer's ranks take all GPUs of the cluster."""
    sleep: bool = False
    """Let engines that share the trainer's GPUs give their memory back while the trainer trains ("colocated"): the
    weights wait in host memory, and the KV cache is dropped. What comes back is compared bit by bit. Needs
    ``share_gpus`` and ``train.max_staleness: 0``."""
    share_base: bool = False
    """Let engines read the frozen base in the memory of the trainer rank on their GPU, instead of holding it again.
    What vLLM keeps in another layout (fused q, k and v) it still holds itself; the run says how much. Engines then
    start after the trainer, and again if a trainer rank is lost. Needs ``share_gpus: true``, adapters as content, the
    trainer's ``parallel.tensor`` for the engines too, and neither pipeline nor expert parallelism."""
    samples_per_prompt: int = Field(8, ge=2, le=65_536)
    """Group size: completions per prompt (n)."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature; the trainer uses it too: the policy is softmax(logits / temperature). At least 0.01: vLLM
    replaces smaller values by 0.01, and the trainer would then compute the logprobs of another policy."""
    top_p: float = 1.0
    """Must be 1: the trainer cannot recompute the logprobs of truncated distributions yet."""
    top_k: int = -1
    """Must be -1 (off), for the same reason."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Most tokens of a prompt. ``task.long_prompts`` decides what becomes of longer ones."""
    max_response_tokens: int = Field(256, ge=1)
    """Most tokens of a completion. A completion that reaches it ends with ``finish_reason="length"``."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a completion (``["</answer>"]``), beside the model's ``eos_token_id``. The completion keeps every
    token up to the one that completes such a text, and ends with ``finish_reason="stop"``. Special tokens are no part
    of the text."""
    logprobs: Literal["worker", "vllm"] = "worker"
    """How the drawn tokens' logprobs reach megarl; both give the same bits. ``worker``: vLLM's worker keeps them until
    a request ends, and those of many requests are fetched at once. ``vllm``: vLLM returns them token by token, which
    costs up to 40% of the tokens per second. Engines whose worker cannot keep them (speculative decoding, an untested
    vLLM) say so once and use the latter."""
    enforce_eager: bool | None = None
    """Disable CUDA graphs and compilation in vLLM. Default: True on CPU, False on CUDA."""
    kv_cache_gib: float = Field(1.0, gt=0.0)
    """Memory for the KV blocks of one engine, GiB."""
    gpu_memory_utilization: float = Field(0.4, gt=0.0, le=1.0)
    """Share of a GPU that vLLM may assume to be free for one engine when it starts (CUDA only)."""
    max_num_seqs: int = Field(256, ge=1)
    """Most sequences that one engine decodes at the same time. Batches of more than 992 run without CUDA graphs."""
    generate_seconds: float = Field(3600.0, gt=0.0)
    """Limit of sampling the completions of one prompt, or one turn of an episode, once an engine has it, seconds. An
    engine that takes longer is lost."""
    max_restarts: int = Field(3, ge=0)
    """How many times engines that died, hang (``train.hang_seconds``) or do not answer (``generate_seconds``) are
    started again before the run ends; all engines together. Their prompts go to the others, with the same seeds."""
    reproducible: bool = False
    """Make two runs with the same seeds draw the same tokens with the same logprobs, bit by bit: the engine begins a
    step's completions only when it has all of its prompts. Shown on CPUs. Needs ``engines: 1``,
    ``train.max_staleness: 0``, no ``stop`` texts and a task of one turn."""
    seed: int = Field(0, ge=0)
    """Base of the samples' seeds. Each depends on this, the prompt's place in the data and the sample's index alone."""
