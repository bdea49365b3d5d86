# SPDX-License-Identifier: Apache-2.0
"""Check that the settings of a resumed run differ from those of the run only where they may."""

from collections.abc import Mapping
from typing import Any

from megarl.config.run import RunConfig
from megarl.errors import ConfigError

# Settings that may change: where and how fast the run is computed, how long, and what is kept. A trailing * stands for
# any ending, a leading one for any beginning. Any other setting affects what is learned.
FREE = (
    "parallel.*", "checkpoint_engine.*", "model.backend", "model.numerics",
    "task.reward_threads", "task.reward_dry_run", "task.reward_retries", "task.reward_processes",
    "sampler.engines", "sampler.parallel",
    "sampler.enforce_eager", "sampler.share_gpus", "sampler.share_base", "sampler.sleep",
    "sampler.gpu_memory_utilization",
    "sampler.max_num_seqs", "sampler.logprobs", "sampler.reproducible",
    "train.steps", "train.micro_batch_tokens", "train.recompute", "train.recompute_layers", "train.cuda_graphs",
    "train.compile",
    "train.shard_base", "train.overlap_*", "train.distributed_optimizer", "train.device", "train.output",
    "train.save_every", "train.eval_every", "train.keep_*", "train.compare_completions", "train.max_mismatch",
    "train.require_gradients",
    "train.tracker*",
    "lora.save_experts", "*max_restarts", "*_seconds", "*_gib",
)  # fmt: skip
# Settings of one start of the run, which the checkpoint does not keep.
START_ONLY = ("train.resume", "train.resume_step", "train.resume_changes")
# Paths, which may change as long as the content of the files stays the same; ``contents`` holds its digests.
PLACES = ("model.path", "task.path", "task.reward", "lora.init_from")
# Settings that may never change, because the checkpoint would not fit.
FIXED = ("model.dtype", "lora.*", "train.seed")
# Name in ``contents`` -> the setting that names the content, and a description.
CONTENTS = {
    "data": ("task.path", "the task's prompts"),
    "tokens": ("model.path", "the token ids of the task's prompts (tokenizer, chat template)"),
    "reward": ("task.reward", "the source of the reward"),
    "adapter": ("lora.init_from", "the adapter that training began with"),
}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return ``section.key`` -> value, JSON-able, for the checkpoint. Resuming the run does not change the result."""
    return {
        f"{section}.{key}": value
        for section, fields in config.model_dump(mode="json").items()
        for key, value in fields.items()
        if f"{section}.{key}" not in START_ONLY
    }


def check_changes(saved: Mapping[str, Any], contents: Mapping[str, Any], config: RunConfig) -> set[str]:
    """Compare the config of a resumed run with the run's settings in the checkpoint.

    Args:
        saved: ``settings`` (from ``settings_of``) and ``contents`` of the run, from the checkpoint.
        contents: the present digests of the files that the settings name; has the keys of ``CONTENTS``.
        config: config of the resumed run.

    Returns:
        The settings that differ, all of them allowed by ``train.resume_changes``.

    Raises:
        ConfigError: other settings differ; the message has both values of each, and a fix.
    """
    now = settings_of(config)
    asked = set(config.train.resume_changes)
    changed = {
        name: f"{name} is {now.get(name)!r}, and was {saved['settings'].get(name)!r}"
        for name in now
        if name not in PLACES and not _fits(name, FREE) and name in saved["settings"]
        if now[name] != saved["settings"][name]
    }
    for key, (name, description) in CONTENTS.items():
        if contents.get(key) != saved["contents"].get(key):
            changed.setdefault(name, f"{name} is {now.get(name)!r}, but {description} differs from the run's")
    fixed = [text for name, text in changed.items() if _fits(name, FIXED)]
    refused = [text for name, text in changed.items() if name not in asked and not _fits(name, FIXED)]
    if fixed:
        raise ConfigError(
            f"train.resume: {'; '.join(fixed)}: a run cannot go on with that; start a new one (lora.init_from takes "
            "the RUN/adapter of this one)"
        )
    if refused:
        names = ",".join(name for name in changed if name not in asked)
        raise ConfigError(
            f"train.resume: {'; '.join(refused)}: it would be another experiment; leave it as it was, or ask for it by "
            f"train.resume_changes=[{names}]"
        )
    return set(changed)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(
        name.startswith(p[:-1]) if p.endswith("*") else name.endswith(p[1:]) if p.startswith("*") else name == p
        for p in patterns
    )
