# SPDX-License-Identifier: Apache-2.0
"""Read an adapter of a model whose family is not listed: by the names in PEFT's file alone."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from megarl.errors import AdapterError, UnsupportedError
from megarl.lora.files.contents import check_finite
from megarl.lora.targets.resolve import ALL_LINEAR
from megarl.peft.names import PREFIX, matrix_name


class NamedPairs:
    """The pairs of an opened weights file.

    Args:
        source: from ``safetensors.safe_open``.
        file: its path, for messages.
        config: PEFT's config beside it.

    Raises:
        AdapterError: the config does not name a module, or a tensor holds a number that is not finite.
        UnsupportedError: a tensor belongs to no linear (an embedding, stacked experts).
    """

    def __init__(self, source: Any, file: Path, config: LoraConfig) -> None:
        self.source = source
        names = set(source.keys())
        ends = (matrix_name("", "A").removeprefix(PREFIX), matrix_name("", "B").removeprefix(PREFIX))
        modules = {name.removeprefix(PREFIX).removesuffix(end) for name in names for end in ends if name.endswith(end)}
        linears = {matrix_name(module, side) for module in modules for side in "AB"}
        stacked = {name for name in linears if name in names and len(source.get_slice(name).get_shape()) != 2}
        unnamed = [module for module in sorted(modules) if not _is_named(config, module)]
        if config.target_parameters:
            stacked |= {matrix_name(module, side) for module in unnamed for side in "AB"}
        if other := sorted((names ^ linears) | stacked):
            raise UnsupportedError(
                f"{file} holds '{other[0]}', which is not one of a linear's two matrices; for this model_type merging "
                "supports adapters of linears only; merge this one with PEFT (merge_and_unload)"
            )
        if unnamed:
            raise AdapterError(
                f"{file} adapts '{unnamed[0]}', which the adapter's config does not name ({len(unnamed)} such modules)"
            )
        check_finite(((name, source.get_tensor(name)) for name in sorted(names)), file)
        self.targets = {module: module for module in sorted(modules)}

    def pair(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole A and B of a linear."""
        a, b = (self.source.get_tensor(matrix_name(module, side)) for side in "AB")
        return a, b


def _is_named(config: LoraConfig, module: str) -> bool:
    """Return True if PEFT adapts the module by this config; with ``all-linear`` the model alone tells."""
    match = config.target_modules == ALL_LINEAR or check_target_module_exists(config, module)
    return bool(match) and type(match).__name__ != "_ExcludedModule"
