# SPDX-License-Identifier: Apache-2.0
"""Read an adapter's weights file into parameters, all or nothing."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megarl.errors import AdapterError
from megarl.lora.files.load import check_stored_names
from megarl.peft.names import BASE_WEIGHT


def load_into(file: Path, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Fill parameters from a weights file of PEFT, after all of it was checked.

    Args:
        file: ``adapter_model.safetensors``.
        parameters: by their names in the file.

    Raises:
        AdapterError: the file is damaged, or a name or shape does not fit. Nothing was changed.
    """
    try:
        stored = load_file(file)
    except FileNotFoundError as error:
        raise AdapterError(f"{file} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
    # PEFT stores the base weights of an adapted embedding or output layer too.
    names = {name for name in stored if not name.endswith(BASE_WEIGHT)}
    check_stored_names(names, set(parameters), file)
    for name, parameter in parameters.items():
        if stored[name].shape != parameter.shape:
            raise AdapterError(
                f"{file}: '{name}' has shape {list(stored[name].shape)}, the model needs {list(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
