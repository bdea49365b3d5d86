# SPDX-License-Identifier: Apache-2.0
"""Build a run's model with its adapters: the trained one, and a frozen copy of its start if the KL penalty needs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megarl.config import RunConfig
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    from megarl.model.trained_model import TrainedModel

# Name of the frozen copy within the model, and of its digest in a checkpoint.
REFERENCE = "reference"


def reference_of(config: RunConfig) -> str | bool:
    """Return the adapter that computes reference logprobs, in the form that ``TrainedModel.forward`` takes.

    Without ``lora.init_from`` a new adapter starts as the base model, so both values of ``loss.reference`` mean the
    model without adapter.
    """
    return REFERENCE if config.loss.reference == "start" and config.lora.init_from else False


def build_trainer(config: RunConfig, groups: Any) -> "TrainedModel":
    """Build the run's model with its adapters, of which the first is trained; a collective.

    Args:
        config: the run's config.
        groups: from ``init_groups``.

    Raises:
        AdapterError, ModelError, UnsupportedError: see ``megarl.build.build_model``.
    """
    from megarl.build import build_with, peft_config_of
    from megarl.peft.spec import AdapterSpec

    peft_config = peft_config_of(config.trainer)
    if config.lora.save_experts != "as_trained":  # refuse now, not at the save hours later
        from megarl.lora.files.arrangements import arrange_config
        from megarl.model.weights.full_config import names_of
        from megarl.model.weights.hf_folder import read_config

        arrange_config(peft_config, names_of(read_config(config.model.path)), config.lora.save_experts)
    specs = [AdapterSpec(peft_config)]
    if config.loss.kl_coef > 0 and reference_of(config):
        specs.append(AdapterSpec(peft_config, REFERENCE, trainable=False))
    return build_with(config.trainer, groups, specs)


def load_start(model: "TrainedModel", config: RunConfig) -> dict[str, str]:
    """Load ``lora.init_from`` into every adapter of the model; a collective.

    Returns:
        State for the checkpoint, by which ``check_start`` recognises the reference.

    Raises:
        AdapterError: the adapter does not fit the model.
    """
    folder = config.lora.init_from
    if not folder:
        return {}
    model.load_adapter(folder)
    if REFERENCE not in model.adapters:
        return {}
    model.adapters[REFERENCE].read(folder)
    return {REFERENCE: digest(Path(folder))}


def check_start(saved: Mapping[str, Any], start: Mapping[str, str], config: RunConfig) -> None:
    """Refuse to resume with another reference adapter than the run had.

    Args:
        saved: the state that the checkpoint holds for its caller.
        start: result of ``load_start``.
        config: config of the run.

    Raises:
        CheckpointError: the files of ``lora.init_from`` have changed since the run started.
    """
    if REFERENCE in saved and saved[REFERENCE] != start.get(REFERENCE):
        raise CheckpointError(
            f"lora.init_from '{config.lora.init_from}' no longer holds the adapter that the run started from and that "
            "its KL penalty (loss.reference=start) is against; put it back"
        )


def digest(folder: Path) -> str:
    """Return the xxh3-64 digest of an adapter's files, in hexadecimal."""
    state = xxhash.xxh3_64()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with (folder.expanduser() / name).open("rb") as file:
            while block := file.read(2**24):
                state.update(block)
    return state.hexdigest()
