# SPDX-License-Identifier: Apache-2.0
"""Steps, optimizer, schedule, output."""

from typing import Literal

from pydantic import Field

from megarl.config.base import Section

# ``train.resume`` that means: find the run.
AUTO = "auto"


class TrainConfig(Section):
    steps: int = Field(100, ge=1)
    """Policy versions to make: one rollout, ``updates_per_step`` optimizer steps and one sync each."""
    prompts_per_step: int = Field(32, ge=1, le=1_000_000)
    """Prompts per rollout; times ``sampler.samples_per_prompt`` completions."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout; more than one makes the later ones off-policy (old logprobs are computed)."""
    learning_rate: float = Field(1e-5, gt=0.0, le=1.0)
    """Peak learning rate; at most 1, by which AdamW would move every element at once."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warmup; ``linear`` and ``cosine`` end at 0."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0; a step is ``updates_per_step`` updates here too. A run
    that is shorter, such as a trial of two steps, makes the beginning of the rise."""
    weight_decay: float = Field(0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the first moment."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """AdamW's decay of the second moment."""
    adam_eps: float = Field(1e-8, gt=0.0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Gradients are clipped to this global norm; 0 switches clipping off."""
    distributed_optimizer: bool = False
    """Spread main weights and moments over data x context parallel ranks (mcore's DistributedOptimizer). Saves memory;
    an adapter's state is small, so it is off by default."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """With ``distributed_optimizer`` and ``overlap_grad_reduce``: gather the updated weights during the next forward
    pass. A sync to the sampler waits for them, so it pays only where ``updates_per_step`` > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them: ``selective``: the core attention;
    ``full``: whole layers."""
    recompute_layers: int | None = Field(None, ge=1)
    """With ``recompute: full``: only the first so many layers of each pipeline stage (or virtual stage)."""
    cuda_graphs: bool = False
    """Run forward and backward passes by CUDA graphs, captured for a few sizes that micro-batches are padded to. Pays
    for small models, whose kernels finish faster than they can be launched; activations then keep their memory."""
    keep_logits_gib: float = Field(6.0, ge=0.0)
    """On a GPU: logits of a micro-batch's response tokens that take no more than this on a rank are kept for the
    backward pass; more are computed again, chunk by chunk."""
    micro_batch_tokens: int = Field(8192, ge=2)
    """Token budget of one packed micro-batch; under context parallelism of all its ranks together."""
    seed: int = Field(0, ge=0)
    """Adapter initialisation, data order, dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where torch sees it."""
    output: str = "runs"
    """Run folders are made below it."""
    save_every: int = Field(10, ge=1)
    """A checkpoint every so many steps, and at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older checkpoints are deleted."""
    keep_rollouts: int | None = Field(None, ge=1)
    """Completions of so many last steps are kept, of older ones deleted. Default: all, some 34 KB per 1,000 tokens."""
    hang_seconds: float = Field(120.0, ge=5.0)
    """The run ends when the process of a trainer rank or engine has given no sign of life for so long: it is stopped,
    frozen or cut off."""
    build_seconds: float = Field(1800.0, gt=0.0)
    """Limit of building the model in all trainer ranks, and of starting all engines."""
    update_seconds: float = Field(3600.0, gt=0.0)
    """Limit of all updates of one step."""
    save_seconds: float = Field(1800.0, gt=0.0)
    """Limit of saving or loading a checkpoint or the adapter."""
    max_mismatch: float | None = Field(None, gt=0.0)
    """The run stops when a step's mean |sampler - trainer| logprob difference exceeds it."""
    resume: str | None = None
    """A run folder to continue from its last checkpoint. ``auto``: the newest unfinished run below ``output`` that has
    these settings and a checkpoint, else a new run; for jobs that are queued again (Slurm)."""
    resume_step: int | None = Field(None, ge=1)
    """With ``resume``: go back to this step's checkpoint instead of the last; what came after it is put aside."""
    resume_changes: list[str] = Field(default_factory=list)
    """With ``resume``: settings that may differ from the run's though they change what is learned (``[task.reward]``).
    Those that only change where, how fast or how long it is computed need not be named."""
