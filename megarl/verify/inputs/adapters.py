# SPDX-License-Identifier: Apache-2.0
"""Make random adapters to verify with, as PEFT directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.families import WeightMap
from megarl.families.base import EMBEDDING
from megarl.lora.files.peft_folder import WEIGHTS
from megarl.lora.targets.resolve import resolve_targets, short_names
from megarl.model.weights.hf_folder import WeightFolder
from megarl.peft.names import BASE_WEIGHT, PREFIX, matrix_name
from megarl.peft.rules import rank_and_scaling
from megarl.verify.inputs.model_facts import names_if_listed


def make_adapter(model: Path, folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write a PEFT adapter with random A and B. B is not zero, so that A has gradients too.

    PEFT itself decides which modules are adapted and in what shapes. Only in mixtures of experts without
    ``target_parameters`` do names and shapes follow from the family, because there PEFT's modules are not those of its
    file.

    Args:
        model: the Hugging Face folder. The linears' weights are not read.
        folder: the directory to write.
        seed: seed of the matrices.
        config: PEFT's settings; default: rank 4, alpha 8, all linears.
    """
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    names, source = names_if_listed(model), WeightFolder(model)
    if names and names.experts_by_module and not settings.get("target_parameters"):
        if settings["target_modules"] == "all-linear":
            settings["target_modules"] = short_names(names.target_names())
        return _write(
            folder, LoraConfig(**settings), _expert_shapes(source, names, LoraConfig(**settings)), source, seed
        )
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        adapted = get_peft_model(base, LoraConfig(**settings))
    shapes = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(adapted).items()}
    return _write(folder, adapted.peft_config["default"], shapes, source, seed)


def _expert_shapes(source: WeightFolder, names: WeightMap, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a file with one A and one B for every linear."""
    chosen = resolve_targets(config, names)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in filter(chosen.__contains__, names.target_names()):
        rows, columns = source.get_slice(f"{name}.weight").get_shape()
        rank = rank_and_scaling(config, chosen[name])[0]
        shapes |= {matrix_name(name, "A"): (rank, columns), matrix_name(name, "B"): (rows, rank)}
    return shapes


def _write(
    folder: Path, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], source: WeightFolder, seed: int
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape)
        if name.endswith(BASE_WEIGHT):  # PEFT adds the base weights of an adapted embedding and lm_head
            weight = f"{name.removeprefix(PREFIX).removesuffix(BASE_WEIGHT)}.weight"
            tensors[name] = source.get_slice(weight if weight in source.file_of else EMBEDDING[1])[:].clone()
        elif "_A" in name:
            tensors[name] = tensor.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        else:
            tensors[name] = tensor.normal_(std=0.05, generator=generator)
    config.inference_mode = True  # as PEFT saves it
    config.save_pretrained(str(folder))
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    return folder
