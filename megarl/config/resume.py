# SPDX-License-Identifier: Apache-2.0
"""Which settings may differ when a run is resumed."""

from collections.abc import Mapping
from typing import Any

from megarl.config.run import RunConfig
from megarl.errors import ConfigError

# Where and how fast it is computed, how long and what is kept; a trailing * stands for any ending, a leading one for
# any beginning. A setting that is not listed decides what is learned.
FREE = (
    "parallel.*", "checkpoint_engine.*", "model.backend", "task.reward_threads", "sampler.engines", "sampler.parallel",
    "sampler.enforce_eager", "sampler.share_gpus", "sampler.gpu_memory_utilization", "sampler.max_num_seqs",
    "train.steps", "train.micro_batch_tokens", "train.recompute", "train.recompute_layers", "train.cuda_graphs",
    "train.overlap_*", "train.distributed_optimizer", "train.device", "train.output", "train.save_every",
    "train.keep_*", "train.max_mismatch", "lora.save_experts", "*_seconds", "*_gib",
)  # fmt: skip
# What a start says of itself is no setting of the run.
OF_A_START = ("train.resume", "train.resume_step", "train.resume_changes")
# The place may be another as long as what lies there is the same: ``contents`` tells.
PLACES = ("model.path", "task.path", "task.reward", "lora.init_from")
# A checkpoint fits no other value.
FIXED = ("model.dtype", "lora.*", "train.seed")
# Name in ``contents`` -> the setting that names it, and what it is.
CONTENTS = {
    "data": ("task.path", "the task's prompts"),
    "tokens": ("model.path", "the token ids of the task's prompts (tokenizer, chat template)"),
    "reward": ("task.reward", "the source of the reward"),
    "adapter": ("lora.init_from", "the adapter that training began with"),
}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """``section.key`` -> value, JSON-able, as a checkpoint keeps them: alike however often the run was resumed."""
    return {
        f"{section}.{key}": value
        for section, fields in config.model_dump(mode="json").items()
        for key, value in fields.items()
        if f"{section}.{key}" not in OF_A_START
    }


def check_changes(saved: Mapping[str, Any], contents: Mapping[str, Any], config: RunConfig) -> set[str]:
    """Compare a run with what its checkpoint says of it.

    Args:
        saved: ``settings`` (from ``settings_of``) and ``contents`` of the run when the checkpoint was saved.
        contents: digests of what the settings name now; the keys of ``CONTENTS``.
        config: the run as it would go on.

    Returns:
        The settings that differ and were asked for by ``train.resume_changes``.

    Raises:
        ConfigError: every other setting that differs, with both values and what to do.
    """
    now = settings_of(config)
    asked = set(config.train.resume_changes)
    changed = {
        name: f"{name} is {now.get(name)!r}, and was {saved['settings'].get(name)!r}"
        for name in now
        if name not in PLACES and not _fits(name, FREE) and name in saved["settings"]
        if now[name] != saved["settings"][name]
    }
    for key, (name, what) in CONTENTS.items():
        if contents.get(key) != saved["contents"].get(key):
            changed.setdefault(name, f"{name} is {now.get(name)!r}, but {what} differs from the run's")
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
