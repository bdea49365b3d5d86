# SPDX-License-Identifier: Apache-2.0
"""Attach the adapters of a run: the trained one and, if the KL penalty needs it, a frozen copy of its start."""

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
    """Return the adapter that computes reference logprobs, in the form that ``MegatronModel.forward`` takes.

    Without ``lora.init_from`` a new adapter starts as the base model, so both values of ``loss.reference`` mean the
    model without adapter.
    """
    return REFERENCE if config.loss.reference == "start" and config.lora.init_from else False


def attach_adapters(config: RunConfig, chunks: list, hf_config: Mapping[str, Any], groups: Any) -> list[Any]:
    """Attach the run's adapters to a model; the first one is trained.

    Args:
        config: only ``lora``, ``loss`` and ``train.seed`` are used.
        chunks, hf_config, groups: as for ``megarl.lora.apply_lora``.

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
    arrange_config(peft_config, names_of(hf_config), section.save_experts)  # refuse now, not at the save hours later
    made = [apply_lora(chunks, peft_config, hf_config, seed=config.train.seed, groups=groups)]
    if config.loss.kl_coef > 0 and reference_of(config):
        made.append(apply_lora(chunks, peft_config, hf_config, name=REFERENCE, trainable=False, groups=groups))
    return made


def load_start(model: "MegatronModel", config: RunConfig) -> dict[str, str]:
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
