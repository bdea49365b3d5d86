# SPDX-License-Identifier: Apache-2.0
"""Turn the command's arguments into the run config to verify. Loads no torch, so that a typo is reported at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import RunConfig, check_run, override_config
from megarl.errors import ConfigError, pick
from megarl.verify.inputs.samples import LONG

# Updates without ``--full``: the first is clipped; the second is not, and is repeated from a checkpoint.
QUICK_STEPS = 2
SECTIONS = ("parallel", "lora", "model", "train")
# Adam moves an element by up to the learning rate, whatever its gradient. 5e-4 keeps the effect of rounding noise on
# one element small (1e-3 over three updates of a matrix of about 0.2), and is used in practice.
TRAIN = {
    "steps": 3,
    "learning_rate": 5e-4,
    # Little more than the longest sequence, so that there are several micro-batches.
    "micro_batch_tokens": 128,
    "prompts_per_step": 64,
    # Three updates at 5e-4 shrink the adapter by 8e-4; without the decay the update would be off by a tenth.
    "weight_decay": 0.5,
}
# Temperature of the policy on both sides.
TEMPERATURE = 0.8


def verify_tree(model: str | Path, *, full: bool = True) -> dict[str, Any]:
    """Return the config before overrides, a new one: float32, short sequences, three updates (two unless ``full``)."""
    half = LONG // 2
    train = TRAIN if full else TRAIN | {"steps": QUICK_STEPS}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "arithmetic"},
        "train": dict(train),
        "sampler": {"max_prompt_tokens": half, "max_response_tokens": half, "temperature": TEMPERATURE},
    }


def verify_config(model: str | Path, overrides: Sequence[str] = (), *, full: bool = True) -> RunConfig:
    """Return the config of ``megarl verify MODEL overrides``.

    Args:
        model: a Hugging Face folder.
        overrides: ``section.key=value`` for the sections ``SECTIONS``, with the run config's names.
        full: three updates, as ``--full``; else two.

    Raises:
        ConfigError: the section is another one, or a value is wrong or cannot be verified.
        UnsupportedError: a layout or option is valid but not tested.
    """
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        pick(dict.fromkeys(SECTIONS), section, f"section of the override '{override}'")
        if override.startswith("model.path="):
            raise ConfigError(f"override '{override}': the model is the command's first argument")
    config = override_config(verify_tree(Path(model).expanduser(), full=full), overrides)
    check_run(config)
    check_dropout(config.lora.lora_dropout, "lora.lora_dropout")
    return config


def check_dropout(dropout: float, field: str) -> None:
    """Refuse dropout: every layout draws other masks, so no two computations could be compared.

    Raises:
        ConfigError: dropout is not 0; the message names the field.
    """
    if dropout:
        raise ConfigError(
            f"{field} is {dropout}; masks are drawn anew in every layout, so verify needs 0 (nothing else depends on "
            "it: verify a copy of the adapter with 0 in its adapter_config.json)"
        )
