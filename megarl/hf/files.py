# SPDX-License-Identifier: Apache-2.0
"""Read an adapter's weights file into parameters, all or nothing."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megarl.errors import AdapterError
from megarl.lora.files.contents import check_finite, check_stored_names


def load_into(
    file: Path, parameters: Mapping[str, torch.nn.Parameter], base_weights: Mapping[str, torch.Tensor]
) -> None:
    """Fill parameters from a weights file of PEFT, after all of it was checked.

    Args:
        file: ``adapter_model.safetensors``.
        parameters: by their names in the file.
        base_weights: the model's own weights that PEFT stores too, by their names in the file, which may lack them.

    Raises:
        AdapterError: the file is damaged or belongs to another model, or a name or shape does not fit. Nothing was
            changed.
    """
    try:
        stored = load_file(file)
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
    check_stored_names(set(stored) - set(base_weights), set(parameters), file)
    for name, parameter in parameters.items():
        if stored[name].shape != parameter.shape:
            raise AdapterError(
                f"{file}: '{name}' has shape {list(stored[name].shape)}, the model needs {list(parameter.shape)}"
            )
    check_finite(((name, stored[name]) for name in parameters), file)
    for name, weight in base_weights.items():
        if name in stored and not torch.equal(stored[name].to(weight), weight):
            raise AdapterError(
                f"{file}: '{name}' differs from the model's own weight; the adapter belongs to another model"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
