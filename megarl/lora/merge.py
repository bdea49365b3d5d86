"""Base weight plus adapter: always out of place, in fp32, rounded once."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import AdapterError, ModelError
from megarl.lora.peft_io import PREFIX, WEIGHTS, load_peft_config, write_directory
from megarl.lora.targets import rank_and_scaling, resolve_targets
from megarl.model.families import names_of
from megarl.model.hf_folder import WeightFolder, read_config


def merge_weight(base: torch.Tensor, matrix_a: torch.Tensor, matrix_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``base + scaling * B @ A`` as a new tensor of base's dtype.

    Args:
        base: ``[out, in]``, or this rank's slice of it.
        matrix_a: ``[r, in]``.
        matrix_b: ``[out, r]``.
        scaling: alpha / r or alpha / sqrt(r).
    """
    delta = (matrix_b.detach().float() @ matrix_a.detach().float()) * scaling
    return (base.detach().float() + delta).to(base.dtype)


def merge_folder(model: Path, adapter: Path, out: Path) -> int:
    """Write a Hugging Face folder whose weights have the adapter merged; one source file in memory at a time.

    Args:
        model: the base model's folder, left untouched.
        adapter: a PEFT directory.
        out: must not exist; appears complete or not at all.

    Returns:
        Number of merged tensors.

    Raises:
        AdapterError: a damaged adapter, or one that does not fit the model.
        ModelError: the base folder is incomplete, or ``out`` exists.
    """
    if out.exists():
        raise ModelError(f"--out '{out}' exists already; name a new folder")
    hf_config = read_config(model)
    config = load_peft_config(adapter)
    targets = resolve_targets(config, names_of(hf_config))
    folder = WeightFolder(model)
    if lost := sorted(f"{name}.weight" for name in targets if f"{name}.weight" not in folder.where):
        raise AdapterError(f"{adapter} adapts '{lost[0]}', which {model} lacks")
    try:
        with safe_open(str(adapter / WEIGHTS), framework="pt", device="cpu") as source:
            with write_directory(out) as partial:
                for file in sorted(set(folder.where.values())):
                    tensors = dict(_merged_file(file, source, targets, config))
                    save_file(tensors, str(partial / file.name), metadata={"format": "pt"})
                for file in model.iterdir():
                    if file.is_file() and file.suffix != ".safetensors":
                        shutil.copy2(file, partial / file.name)
    except (SafetensorError, FileNotFoundError) as error:
        raise AdapterError(
            f"{adapter / WEIGHTS} cannot be read ({error}); it is missing, truncated or damaged"
        ) from error
    return len(targets)


def _merged_file(file: Path, adapter: Any, targets: set[str], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one safetensors file, merged where they are targets."""
    with safe_open(str(file), framework="pt", device="cpu") as source:
        for name in source.keys():  # noqa: SIM118
            tensor, module = source.get_tensor(name), name.removesuffix(".weight")
            if module in targets:
                matrix_a, matrix_b = (adapter.get_tensor(f"{PREFIX}{module}.lora_{side}.weight") for side in "AB")
                if (matrix_b.shape[0], matrix_a.shape[1]) != tuple(tensor.shape):
                    raise AdapterError(
                        f"the adapter of '{module}' is for a {matrix_b.shape[0]} x {matrix_a.shape[1]} layer; the "
                        f"model's is {tensor.shape[0]} x {tensor.shape[1]}"
                    )
                tensor = merge_weight(tensor, matrix_a, matrix_b, rank_and_scaling(config, module)[1])
            yield name, tensor
