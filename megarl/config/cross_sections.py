# SPDX-License-Identifier: Apache-2.0
"""Check one section against another, without reading files. ``megarl.config.checks`` compares with the model."""

from megarl.config.sections.checkpoint_engine import CheckpointEngineConfig
from megarl.config.sections.loss import LossConfig
from megarl.config.sections.parallel import ParallelConfig
from megarl.config.sections.sampler import SamplerConfig
from megarl.config.sections.train import TrainConfig
from megarl.errors import ConfigError, UnsupportedError


def check_sections(parallel: ParallelConfig, sampler: SamplerConfig, train: TrainConfig) -> None:
    """Check values that involve several sections.

    Raises:
        ConfigError: values that contradict each other.
        UnsupportedError: a sampling method that is not proven.
    """
    check_layout(parallel)
    check_switches(train)
    check_sampling(sampler)
    _check_budget(parallel, sampler, train)
    total = train.prompts_per_step * sampler.samples_per_prompt
    if train.updates_per_step > train.prompts_per_step:
        raise ConfigError(
            f"train.updates_per_step ({train.updates_per_step}) must be at most train.prompts_per_step "
            f"({train.prompts_per_step}): an update takes whole groups"
        )
    if total < parallel.data:
        raise ConfigError(
            f"parallel.data ({parallel.data}) exceeds the {total} completions of a step "
            "(train.prompts_per_step x sampler.samples_per_prompt)"
        )


def check_layout(parallel: ParallelConfig) -> None:
    """Refuse layouts that are not proven, and combinations that make no sense."""
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence is true, which needs parallel.tensor > 1 (it is 1)")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline ({parallel.virtual_pipeline}) needs parallel.pipeline > 1 (it is 1)"
        )


def _check_budget(parallel: ParallelConfig, sampler: SamplerConfig, train: TrainConfig) -> None:
    """Check that a micro-batch can hold the longest sequence.

    The last token of a sequence is not fed to the model. Context parallelism pads the others to a multiple of two
    chunks per rank."""
    length = sampler.max_prompt_tokens + sampler.max_response_tokens
    if train.micro_batch_tokens < length:
        raise ConfigError(
            f"train.micro_batch_tokens ({train.micro_batch_tokens}) must hold the longest sequence, "
            f"sampler.max_prompt_tokens + sampler.max_response_tokens = {length}"
        )
    chunks = 2 * parallel.context
    padded = -(-(length - 1) // chunks) * chunks
    if parallel.context > 1 and train.micro_batch_tokens < padded:
        raise ConfigError(
            f"train.micro_batch_tokens ({train.micro_batch_tokens}) must hold the longest sequence padded to a "
            f"multiple of 2 x parallel.context ({chunks}); make it at least {padded}"
        )


def check_switches(train: TrainConfig) -> None:
    """Refuse switches of mcore that need another switch that is off."""
    needed = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(train, name)]
    if train.overlap_param_gather and needed:
        raise ConfigError(f"train.overlap_param_gather is true, which needs train.{needed[0]} (it is false)")
    if train.recompute_layers is not None and train.recompute != "full":
        raise ConfigError(
            f"train.recompute_layers is {train.recompute_layers}, which needs train.recompute 'full' "
            f"(it is '{train.recompute}')"
        )


def check_sampling(sampler: SamplerConfig) -> None:
    """Refuse truncated distributions, since the trainer cannot recompute their logprobs."""
    if sampler.top_p != 1.0:
        raise UnsupportedError(f"sampler.top_p is {sampler.top_p}; only 1.0 is supported: the trainer cannot replay it")
    if sampler.top_k != -1:
        raise UnsupportedError(f"sampler.top_k is {sampler.top_k}; only -1 (off) is supported")


def check_staleness(train: TrainConfig, loss: LossConfig) -> None:
    """Refuse settings that an asynchronous run would not honour."""
    if not train.max_staleness:
        return
    if train.max_staleness < train.updates_per_step:
        raise ConfigError(
            f"train.max_staleness ({train.max_staleness}) is less than train.updates_per_step "
            f"({train.updates_per_step}): nothing could be sampled while the trainer trains; use 0 or at least "
            f"{train.updates_per_step}"
        )
    if loss.importance_cap is None:
        raise ConfigError(
            "loss.importance_cap is null with train.max_staleness > 0: nothing would correct for tokens of older "
            "versions; set a cap"
        )
    if train.max_mismatch is not None:
        raise ConfigError(
            f"train.max_mismatch is {train.max_mismatch} with train.max_staleness > 0, where the difference includes "
            "that of the versions; remove it (checkpoint_engine.canary compares sampler and trainer at one version)"
        )


def check_sleep(train: TrainConfig, sampler: SamplerConfig) -> None:
    """Refuse engines that would sleep while they sample, or beside a trainer that never gets their memory."""
    if not sampler.sleep:
        return
    if train.max_staleness:
        raise ConfigError(
            f"sampler.sleep is true with train.max_staleness {train.max_staleness}: engines that sample while the "
            "trainer trains cannot sleep; set one of them to false or 0"
        )
    if sampler.share_gpus is False:
        raise ConfigError("sampler.sleep is true, but sampler.share_gpus is false: nobody would use the memory")


def check_share_base(
    parallel: ParallelConfig, sampler: SamplerConfig, train: TrainConfig, sync: CheckpointEngineConfig
) -> None:
    """Refuse ``sampler.share_base`` where no rank holds what an engine needs, or something would write into it."""
    if not sampler.share_base:
        return
    refused = {
        f"sampler.share_gpus {str(sampler.share_gpus).lower()} (set it to true)": not sampler.share_gpus,
        f"checkpoint_engine.content {sync.content} (every sync would write into the base)": sync.content != "adapter",
        f"checkpoint_engine.base_weights {sync.base_weights} (nothing would compare it)": sync.base_weights != "send",
        f"train.device {train.device} (it needs GPUs)": train.device == "cpu",
        "train.shard_base true (no rank holds the whole base)": train.shard_base,
        f"parallel.tensor {parallel.tensor} and sampler.parallel.tensor {sampler.parallel.tensor} (set both alike: a "
        "worker reads what the rank on its GPU holds)": parallel.tensor != sampler.parallel.tensor,
        f"parallel.expert_tensor {parallel.expert_tensor} and sampler.parallel.tensor {sampler.parallel.tensor} (set "
        "both alike; with 1 the engine copies experts)": parallel.expert_tensor not in (1, sampler.parallel.tensor),
    }
    for axis in ("pipeline", "expert"):
        size = getattr(parallel, axis)
        refused[f"parallel.{axis} {size} (no rank holds all layers and experts)"] = size > 1
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(f"sampler.share_base is true with {setting}; change one of them")


def check_reproducible(train: TrainConfig, sampler: SamplerConfig) -> None:
    """Refuse ``sampler.reproducible`` where timing decides what is batched together."""
    if not sampler.reproducible:
        return
    refused = {
        f"sampler.engines {sampler.engines} (prompts go to the engine with the least to do)": sampler.engines > 1,
        f"train.max_staleness {train.max_staleness} (engines sample while the trainer trains)": train.max_staleness > 0,
        f"sampler.stop {sampler.stop} (vLLM finds a text after it has begun the next token)": bool(sampler.stop),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(f"sampler.reproducible is true with {setting}; change one of them")


def check_overlong(loss: LossConfig, sampler: SamplerConfig) -> None:
    """Refuse a length penalty that begins before the first token."""
    if loss.truncated == "penalise" and loss.overlong_tokens > sampler.max_response_tokens:
        raise ConfigError(
            f"loss.overlong_tokens ({loss.overlong_tokens}) must be at most sampler.max_response_tokens "
            f"({sampler.max_response_tokens})"
        )
