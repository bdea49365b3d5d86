# SPDX-License-Identifier: Apache-2.0
"""Config section ``train``: steps, optimizer, schedule, output."""

from typing import Literal

from pydantic import Field

from megarl.config.base import Section

# Value of ``train.resume`` that means: find the run to resume.
AUTO = "auto"


class TrainConfig(Section):
    steps: int = Field(100, ge=1)
    """Number of steps. Each makes one policy version: one rollout, ``updates_per_step`` optimizer steps, one sync."""
    prompts_per_step: int = Field(32, ge=1, le=1_000_000)
    """Prompts per rollout. Each has ``sampler.samples_per_prompt`` completions."""
    max_resample_factor: int = Field(3, ge=1)
    """With ``loss.groups_without_signal: resample``: a step draws at most this many times ``prompts_per_step``
    prompts."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout. With more than one, the later ones are off-policy, so old logprobs are computed."""
    max_staleness: int = Field(0, ge=0)
    """0: sampler and trainer take turns. N: the engines sample while the trainer trains, and no token is trained on
    that is more than N policy versions old when its step begins (but see ``stale_groups``). At least
    ``updates_per_step``. ``loss.importance_cap`` corrects for the difference; ``checkpoint_engine.in_flight``
    decides over completions that a new version interrupts."""
    stale_groups: Literal["repeat", "train"] = "repeat"
    """With ``max_staleness``: what happens to a group that got older than that. ``repeat``: its prompt is sampled
    again; ``train``: it is trained on all the same. ``repeated_groups`` in the metrics counts the repeated ones."""
    learning_rate: float = Field(1e-5, gt=0.0, le=1.0)
    """Peak learning rate. At most 1, since AdamW changes an element by about the learning rate in each step."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warmup. ``linear`` and ``cosine`` end at 0."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0. As in ``steps``, each is ``updates_per_step`` updates.
    A run that is shorter, such as a trial of two steps, does only the beginning of the rise."""
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
    """Spread main weights and moments over data x context parallel ranks (mcore's DistributedOptimizer). This saves
    memory. It is off by default because an adapter's state is small."""
    shard_base: bool = False
    """With ``model.backend: transformers``: spread the frozen base over data-parallel ranks (FSDP2). Each layer is
    gathered when it computes."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather the updated weights during the next forward pass; needs ``distributed_optimizer`` and
    ``overlap_grad_reduce``. A sync to the sampler waits for them, so this pays only if ``updates_per_step`` > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of keeping them. ``selective``: the core attention;
    ``full``: whole layers."""
    recompute_layers: int | None = Field(None, ge=1)
    """With ``recompute: full``: recompute only this many layers, the first ones of each (virtual) pipeline stage."""
    cuda_graphs: bool = False
    """Run forward and backward passes as CUDA graphs, captured for a few sizes; micro-batches are padded to them. This
    pays for small models, whose kernels finish faster than they can be launched, and on busy hosts. Activations then
    keep their memory. ``lora_dropout`` fits without tensor parallelism and without ``recompute``.
    With experts: on one rank, in 16 bits, with adapters whose ranks are multiples of 8, on a Hopper GPU."""
    compile: bool = False
    """Compile the transformer layers with torch.compile, in place. Needs a C++ compiler on a CPU. The first step takes
    minutes; after that no packing compiles anything again (``compilations`` in the metrics counts). Micro-batches are
    padded to a multiple of 16 tokens, so with ``lora_dropout`` other elements are dropped than without. The attention
    of ``model.backend: te`` stays uncompiled, and so do, with experts, the router and the exchange of tokens. On one
    GPU, in 16 bits, with adapters of all linears and without dropout, nothing is left to compile: megarl's operations
    compute a layer whole, and are called directly.
    ``recompute: selective`` then changes nothing: attention keeps no weights here."""
    keep_logits_gib: float = Field(6.0, ge=0.0)
    """On a GPU: the logits of a micro-batch's response tokens are kept for the backward pass if they take at most this
    much memory on a rank; otherwise they are recomputed chunk by chunk."""
    micro_batch_tokens: int = Field(8192, ge=2)
    """Token budget of one packed micro-batch; under context parallelism, of all its ranks together."""
    seed: int = Field(0, ge=0)
    """Seed of adapter initialisation, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer. ``auto``: CUDA if torch sees it."""
    output: str = "runs"
    """Folder in which run folders are made."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between two evaluations on the sets of ``eval.tasks`` and ``task.held_out``. Default: only before the first
    step and after the last."""
    save_every: int = Field(10, ge=1)
    """Steps between two checkpoints. There is also one at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    keep_rollouts: int | None = Field(None, ge=1)
    """Keep the completions of only this many last steps, and of as many evaluations. Default: all, about 34 KB per
    1,000 tokens."""
    compare_completions: int = Field(4, ge=0, le=1024)
    """Completions of each step for which the trainer's logprob of each token is recorded beside the sampler's, for
    ``megarl report``: one forward pass of so many sequences. 0: none."""
    hang_seconds: float = Field(120.0, ge=5.0)
    """A trainer rank or engine is lost if its process gives no sign of life for this many seconds, because it is
    stopped, frozen or cut off. All ranks are lost if none of them gets on with an update for this long: each layer's
    forward and backward pass counts."""
    max_restarts: int = Field(3, ge=0)
    """How many times all trainer ranks are started again from the last checkpoint before the run ends, after one of
    them died, hangs (``hang_seconds``) or exceeded a limit (``*_seconds``). Lost engines have their own number:
    ``sampler.max_restarts``."""
    node_seconds: float = Field(600.0, gt=0.0)
    """Limit of waiting for a lost node, or another one with as much room, seconds. Then the run ends. What the node
    held starts again there, and counts as a restart."""
    build_seconds: float = Field(1800.0, gt=0.0)
    """Limit of building the model in all trainer ranks, and of starting all engines, seconds."""
    update_seconds: float = Field(3600.0, gt=0.0)
    """Limit of each call of the trainer: a forward pass, forward and backward passes, an optimizer step. Seconds."""
    save_seconds: float = Field(1800.0, gt=0.0)
    """Limit of saving or loading a checkpoint or the adapter, seconds."""
    trackers: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Trackers that the run's config, metrics and summary are sent to: ``tensorboard``, ``wandb``, ``mlflow``,
    ``swanlab``, ``trackio``, each through its own library; or ``file.py:Name`` for a tracker of your own."""
    tracker_project: str = Field("megarl", min_length=1)
    """Project (MLflow: experiment) of the run in trackers that have projects."""
    require_gradients: bool = True
    """The run stops if, after three updates that had a gradient, a matrix of the adapter had none in any of them.
    Some routed experts' matrices may have none, since they may get no tokens, but not those of all experts."""
    max_mismatch: float | None = Field(None, gt=0.0)
    """The run stops if a step's mean |sampler - trainer| logprob difference exceeds this."""
    resume: str | None = None
    """A run folder whose last checkpoint the run continues from. ``auto``: the newest unfinished run in ``output`` that
    has these settings and a checkpoint, else a new run; for jobs that are queued again (Slurm)."""
    resume_step: int | None = Field(None, ge=1)
    """With ``resume``: return to this step's checkpoint instead of the last. Everything later is set aside."""
    resume_changes: list[str] = Field(default_factory=list)
    """With ``resume``: settings that may differ from the run's although they affect what is learned
    (``[task.reward]``). Settings that only affect where, how fast or how long the run is computed need not be named."""
