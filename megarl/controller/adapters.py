# SPDX-License-Identifier: Apache-2.0
"""The adapters of a run: the one that is trained and, where the KL penalty needs it, a frozen copy of its start."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megarl.config import RunConfig
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    from megarl.model.megatron_model import MegatronModel

# Name of the frozen copy within the model, and of its digest in a checkpoint.
REFERENCE = "reference"


def reference_of(config: RunConfig) -> str | bool:
    """The adapter that gives reference logprobs, as ``MegatronModel.forward`` takes it.

    Without ``lora.init_from`` the run starts as the base model computes: that is the reference, whatever is chosen.
    """
    return REFERENCE if config.loss.reference == "start" and config.lora.init_from else False


def attach_adapters(config: RunConfig, chunks: list, hf_config: Mapping[str, Any], groups: Any) -> list[Any]:
    """Put the run's adapters on a model; the first is trained.

    Args:
        config: ``lora``, ``loss`` and ``train.seed`` are used.
        chunks, hf_config, groups: as ``megarl.lora.apply_lora`` takes them.

    Raises:
        AdapterError, UnsupportedError: see ``apply_lora``.
    """
    from peft import LoraConfig

    from megarl.lora import apply_lora, load_peft_config
    from megarl.lora.files.arrangements import arrange_config
    from megarl.model.weights.full_config import names_of

    section = config.lora
    if section.init_from:
        peft_config = load_peft_config(section.init_from)
    else:
        base = config.model.path
        peft_config = LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, **section.peft_settings())
    arrange_config(peft_config, names_of(hf_config), section.save_experts)  # hours before it is saved
    made = [apply_lora(chunks, peft_config, hf_config, seed=config.train.seed, groups=groups)]
    if config.loss.kl_coef > 0 and reference_of(config):
        made.append(apply_lora(chunks, peft_config, hf_config, name=REFERENCE, trainable=False, groups=groups))
    return made


def load_start(model: "MegatronModel", config: RunConfig) -> dict[str, str]:
    """Load ``lora.init_from`` into every adapter of the model; a collective.

    Returns:
        What a checkpoint must keep, so that ``check_start`` knows the reference again.

    Raises:
        AdapterError: the adapter does not fit.
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
    """Refuse to resume with another reference than the one that the run had.

    Args:
        saved: what the checkpoint holds of its caller.
        start: of ``load_start``.
        config: the run.

    Raises:
        CheckpointError: the files of ``lora.init_from`` are no longer those that the run started from.
    """
    if REFERENCE in saved and saved[REFERENCE] != start.get(REFERENCE):
        raise CheckpointError(
            f"lora.init_from '{config.lora.init_from}' no longer holds the adapter that the run started from and that "
            "its KL penalty (loss.reference=start) is against; put it back"
        )


def digest(folder: Path) -> str:
    """xxh3-64 of an adapter's files, hexadecimal."""
    state = xxhash.xxh3_64()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with (folder.expanduser() / name).open("rb") as file:
            while block := file.read(2**24):
                state.update(block)
    return state.hexdigest()
